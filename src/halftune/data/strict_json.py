"""Strict JSON parsing: duplicate keys, lone surrogates and deep nesting are errors."""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 100  # levels of nesting; conversations have about ten
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class BadJson(Exception):
    """Invalid JSON; ``line`` and ``column`` are 1-based, 0 if unknown."""

    def __init__(self, what: str, line: int = 0, column: int = 0) -> None:
        super().__init__(what)
        self.what, self.line, self.column = what, line, column


class _Repeated(dict[str, Any]):
    """An object with a duplicate key."""

    key = ""


def parse(text: str) -> tuple[Any, bool]:
    """Parse JSON; returns the value, and whether ``find_fault`` must check it.

    Raises:
        BadJson: invalid JSON, a number with too many digits, or too deep nesting.
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
        raise BadJson("JSON number with more than 4300 digits") from error
    deep = text.count("[") + text.count("{") > DEEPEST
    return value, repeated or deep or _SURROGATE.search(text) is not None


def find_fault(value: Any) -> str:
    """The error inside a parsed value: a duplicate key, a lone surrogate, deep nesting; "" if none."""
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, str):
            if not _is_text(item):
                return "text with a lone surrogate (such as \\ud83d), which is not a valid character"
        elif isinstance(item, dict | list):
            if depth > DEEPEST:
                return f"JSON nested more than {DEEPEST} levels deep"
            if isinstance(item, _Repeated):
                return f"duplicate JSON key {item.key!r}"
            parts = [*item, *item.values()] if isinstance(item, dict) else item
            waiting += [(part, depth + 1) for part in parts]
    return ""


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
