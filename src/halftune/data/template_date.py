"""Fixes the date of chat templates that print it (``strftime_now``), so a resumed run renders the same text."""

from __future__ import annotations

import json
from datetime import date, datetime, time
from functools import lru_cache

_CALL = "strftime_now"
# strftime directives. `%-d` is `%d` without a leading zero; `%%` is replaced last, after all other directives.
_DIRECTIVES = (*(f"%-{letter}" for letter in "dmHIMSjy"), *(f"%{letter}" for letter in "aAbBcdDeFHIjmMpSTuUwWxXyY%"))


def writes_date(template: str) -> bool:
    """Whether a chat template prints the current date."""
    return _CALL in template


@lru_cache(maxsize=8)
def with_date(template: str, day: date) -> str:
    """Return the template with the current time replaced by midnight of ``day``.

    A macro in the template shadows the function: transformers passes no callables to templates.
    """
    moment = datetime.combine(day, time())
    pairs = ((directive, moment.strftime(directive)) for directive in _DIRECTIVES)
    filters = "".join(f"|replace({json.dumps(old)},{json.dumps(new)})" for old, new in pairs)
    return f"{{% macro {_CALL}(format) %}}{{{{ format{filters} }}}}{{% endmacro +%}}{template}"
