"""Reads typed values from a row: texts, flags, strict JSON, and missing values.

Null, NaN and infinities are missing: tables and lenient JSON write empty cells so.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from halftune.core.table import did_you_mean
from halftune.data.formats.conversation import ONLY_TEXT, RowDropped, RowError

DEEPEST = 100  # levels of nesting; conversations have about ten
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
NOT_FINITE = "NaN or an infinity was read as a missing value"
MEDIA_COLUMNS = ("images", "image", "audios", "audio", "videos", "video")
_RATINGS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}  # True is 1 and 1.0, too
_MEDIA = frozenset(MEDIA_COLUMNS)


class BadJson(Exception):
    """Invalid JSON; ``line`` and ``column`` are 1-based, 0 if unknown."""

    def __init__(self, what: str, line: int = 0, column: int = 0) -> None:
        super().__init__(what)
        self.what, self.line, self.column = what, line, column


class _Repeated(dict[str, Any]):
    """An object with a duplicate key.

    Attributes:
        key: the key.
        made: number of such objects in this process.
    """

    key = ""
    made = 0


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    names = [name for name, _ in pairs]
    marked = _Repeated(made)
    marked.key = next(name for name in names if names.count(name) > 1)
    _Repeated.made += 1
    return marked


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def parse(text: str) -> tuple[Any, bool]:
    """Parse JSON; returns the value, and whether ``find_fault`` must check it.

    Raises:
        BadJson: invalid JSON, a number with too many digits, or too deep nesting.
    """
    repeated = _Repeated.made
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise BadJson(f"not valid JSON: {error.msg}", error.lineno, error.colno) from error
    except RecursionError as error:
        raise BadJson(f"JSON nested more than {DEEPEST} levels deep") from error
    except ValueError as error:  # Python converts no integer of more than 4300 digits
        raise BadJson("JSON number with more than 4300 digits") from error
    deep = text.count("[") + text.count("{") > DEEPEST
    return value, _Repeated.made > repeated or deep or _SURROGATE.search(text) is not None


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


def is_missing(value: Any) -> bool:
    """Whether a value is null, NaN or infinite."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def is_empty(value: Any) -> bool:
    """Whether a value is missing, or a text, a list or an object without content."""
    return is_missing(value) or (not value and isinstance(value, str | list | tuple | Mapping))


def refuse_unread(value: Mapping[str, Any], read: Collection[str], what: str) -> None:
    """Refuse an object with further keys: its reader would drop what may be text of training.

    Raises:
        RowError: a key is not among ``read``, and its value is not empty.
    """
    for key, given in value.items():
        if key not in read and not is_empty(given):
            raise RowError(f"{what}: unknown key {key!r}", did_you_mean(str(key), read))


def unread(row: Mapping[str, Any], columns: Iterable[str]) -> tuple[str, ...]:
    """A note on those of the columns that have a value in the row; none of them is read."""
    left = [name for name in columns if not is_empty(row.get(name))]
    return (f"columns not read: {', '.join(left)}",) if left else ()


def holds_missing(value: Any) -> bool:
    """Whether a nested value contains NaN or an infinity."""
    if isinstance(value, float):
        return not math.isfinite(value)
    parts: Iterable[Any] = ()
    if isinstance(value, dict) or (not isinstance(value, str | list) and isinstance(value, Mapping)):
        parts = value.values()  # the check for other mappings is slow
    elif isinstance(value, list | tuple):
        parts = value
    return any(type(part) is not str and holds_missing(part) for part in parts)  # most are texts


def with_nulls(value: Any) -> Any:
    """A copy with NaN and infinities replaced by null."""
    if isinstance(value, Mapping):
        return {name: with_nulls(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_nulls(item) for item in value]
    return None if is_missing(value) else value


def text(row: Mapping[str, Any], column: str, where: str = "") -> str:
    """A text column; "" if absent, null, NaN or infinite. Numbers become text; ``where`` begins the error.

    Raises:
        RowError: the value is a list, an object or a boolean.
    """
    value = row.get(column)
    if is_missing(value):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise RowError(f"{where}{column}: expected text, got {_kind(value)}")


_EMPTY = {"an answer": "the answer is empty", "a prompt": "the prompt is empty", "a text": "the text is empty"}


def answer(row: Mapping[str, Any], column: str, name: str = "an answer") -> str:
    """The column of the answer, or of what else ``name`` says.

    Raises:
        RowError: the row has no such column.
        RowDropped: it is empty.
    """
    if column not in row:
        raise RowError(f"row without {name}: it has no column {column!r}")
    value = text(row, column)
    if not value.strip():
        raise RowDropped(_EMPTY[name])
    return value


def parse_json(value: Any, what: str) -> Any:
    """A JSON column: strings are parsed, other values are returned unchanged.

    Raises:
        RowError: the string is not valid JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        parsed, suspect = parse(value)
    except BadJson as error:
        start = value if len(value) <= 60 else value[:57] + "..."
        place = f" at column {error.column} of {start!r}" if error.column else ""
        raise RowError(f"{what} is {error.what}{place}") from error
    if suspect and (wrong := find_fault(parsed)):
        raise RowError(f"{what}: {wrong}")
    if holds_missing(parsed):
        raise RowError(f"{what} is not valid JSON: NaN and Infinity are not allowed")
    return parsed


def flag(message: Mapping[str, Any], where: str) -> bool | None:
    """Whether ``train`` (a boolean) or ``weight`` (0 or 1) marks a message as trained; None if neither is set.

    Raises:
        RowError: any other value, such as the string "false".
    """
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise RowError(f"{where}: train: expected true or false, got {train!r}")
    if weight is None:
        return train
    if isinstance(weight, bool | str) or weight not in (0, 1):
        raise RowError(f"{where}: weight: expected 0 or 1, got {weight!r}")
    if train not in (None, weight == 1):
        raise RowError(f"{where}: train: {train} and weight: {weight}", "keep one of them")
    return weight == 1


def rating(value: Any) -> bool | None:
    """What a label of true, false, 1 or 0 says, also as text; None for another value."""
    value = value.strip().lower() if isinstance(value, str) else value
    return _RATINGS.get(value) if isinstance(value, int | float | str) else None


def tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The ``tools`` column, a list of function schemas, optionally as a JSON string; None if there are none.

    Raises:
        RowError: it is not valid JSON, or not a list of objects with a name.
    """
    value = row.get("tools")
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    parsed = parse_json(value, "tools")
    if isinstance(parsed, list | tuple):
        parsed = [parse_json(tool, "tools") for tool in parsed]
    if not isinstance(parsed, list) or not all(isinstance(tool, dict) for tool in parsed):
        raise RowError(f"tools: expected a list of function schemas, got {_kind(parsed)}")
    return [_tool(tool) for tool in parsed] or None


def _tool(schema: dict[str, Any]) -> dict[str, Any]:
    function = schema.get("function", schema)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("a tool has no name")
    return schema if "function" in schema else {"type": "function", "function": schema}


def refuse_media(row: Mapping[str, Any]) -> None:
    """Raise RowDropped if the row has images, audio or video: only text is trained."""
    for column in () if _MEDIA.isdisjoint(row) else MEDIA_COLUMNS:
        if row.get(column):
            raise RowDropped(f"row with {column}: {ONLY_TEXT}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a boolean", str: "a string", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
