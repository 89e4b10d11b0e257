"""HTML of the page, from the files of ``templates``."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup, escape

from halftune.core import templates

_CODE = re.compile(r" \[([a-z]+\.[a-z_0-9]+)\]$", re.MULTILINE)


def render(name: str, **values: Any) -> Markup:
    """The template ``templates/<name>.html`` with these values; text is escaped, ``Markup`` is not."""
    return templates.render("halftune_webui", name, small_codes=small_codes, **values)


def small_codes(text: str) -> Markup:
    """A text as HTML, in which the error code at the end of a line is small."""
    return Markup(_CODE.sub(r' <small class="code">\1</small>', str(escape(text))))
