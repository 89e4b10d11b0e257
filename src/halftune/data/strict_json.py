"""Parses JSON as data for training: what another parser would quietly bend, or stumble over, is named."""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 100  # levels of nesting; conversations have about ten
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class BadJson(Exception):
    """A text that is no JSON; ``line`` and ``column`` are 1-based, 0 where the place is not known."""

    def __init__(self, what: str, line: int = 0, column: int = 0) -> None:
        super().__init__(what)
        self.what, self.line, self.column = what, line, column


class _Repeated(dict[str, Any]):
    """An object in which a key stands twice."""

    key = ""


def parse(text: str) -> tuple[Any, bool]:
    """The value, and whether ``fault`` should look at it.

    Raises:
        BadJson: not valid JSON, a number too long for a number, or nested too deeply to be read.
    """
    repeated = False

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeated
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        repeated, names = True, [name for name, _ in pairs]
        marked = _Repeated(made)
        marked.key = next(name for name in names if names.count(name) > 1)
        return marked

    try:
        value = json.loads(text, object_pairs_hook=make)
    except json.JSONDecodeError as error:
        raise BadJson(f"not valid JSON: {error.msg}", error.lineno, error.colno) from error
    except RecursionError as error:
        raise BadJson(f"JSON nested more than {DEEPEST} levels deep") from error
    except ValueError as error:  # Python converts no integer of more than 4300 digits
        raise BadJson("JSON with a number of more than 4300 digits") from error
    deep = text.count("[") + text.count("{") > DEEPEST
    return value, repeated or deep or _SURROGATE.search(text) is not None


def fault(value: Any) -> str:
    """What is wrong inside a parsed value: a key that stands twice, half a character, deep nesting; or ""."""
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, str):
            if not _is_text(item):
                return "a text holds half of a surrogate pair (such as \\ud83d alone), which is no character"
        elif isinstance(item, dict | list):
            if depth > DEEPEST:
                return f"JSON nested more than {DEEPEST} levels deep"
            if isinstance(item, _Repeated):
                return f"the key {item.key!r} stands twice in one object"
            parts = [*item, *item.values()] if isinstance(item, dict) else item
            waiting += [(part, depth + 1) for part in parts]
    return ""


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
