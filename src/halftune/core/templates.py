"""Renders HTML templates of a package's ``templates`` folder, with values escaped."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(package: str, name: str, **values: Any) -> Markup:
    """Render ``templates/<name>.html`` of a package; text is escaped, ``Markup`` is not.

    Raises:
        jinja2.UndefinedError: a value is missing.
    """
    return Markup(_environment(package).get_template(f"{name}.html").render(values))


@cache
def _environment(package: str) -> Environment:
    return Environment(
        loader=PackageLoader(package), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
