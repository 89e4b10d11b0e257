"""Reads typed values out of a row: texts, flags, JSON columns. Whatever is not what it should be names itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halftune.data.conversation import RowDropped, RowError
from halftune.data.missing import holds_missing, is_missing
from halftune.data.strict_json import BadJson, fault, parse

MEDIA_COLUMNS = ("images", "image", "audios", "audio", "videos", "video")


def text(row: Mapping[str, Any], column: str) -> str:
    """A text column; "" where it is absent, null, NaN or infinite. Numbers are written out.

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
    raise RowError(f"{column} should be a text, not {_kind(value)}")


def answer(row: Mapping[str, Any], column: str) -> str:
    """The column that holds the answer.

    Raises:
        RowError: the row has no such column.
        RowDropped: it is empty.
    """
    if column not in row:
        raise RowError(f"row without an answer: it has no column {column!r}")
    value = text(row, column)
    if not value.strip():
        raise RowDropped("the answer is empty")
    return value


def parse_json(value: Any, what: str) -> Any:
    """A JSON column: parsed where it is a string, as it is otherwise.

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
    if suspect and (wrong := fault(parsed)):
        raise RowError(f"{what}: {wrong}")
    if holds_missing(parsed):
        raise RowError(f"{what} is not valid JSON: NaN and infinities are no JSON")
    return parsed


def flag(message: Mapping[str, Any], where: str) -> bool | None:
    """Whether a message is trained, as ``train`` (a boolean) or ``weight`` (0 or 1) says; None where neither does.

    Raises:
        RowError: something else stands there, such as the string "false".
    """
    train, weight = message.get("train"), message.get("weight")
    if train is not None:
        if not isinstance(train, bool):
            raise RowError(f"{where}: train should be true or false, not {train!r}")
        return train
    if weight is None:
        return None
    if isinstance(weight, bool | str) or weight not in (0, 1):
        raise RowError(f"{where}: weight should be 0 or 1, not {weight!r}")
    return weight == 1


def tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The ``tools`` column, a list of function schemas or such a list as a JSON string; None where there are none.

    Raises:
        RowError: it is not valid JSON, or not a list of objects with a name.
    """
    value = row.get("tools")
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    parsed = parse_json(value, "tools")
    if not isinstance(parsed, list) or not all(isinstance(tool, dict) for tool in parsed):
        raise RowError(f"tools should be a list of function schemas, not {_kind(parsed)}")
    return [_tool(tool) for tool in parsed] or None


def _tool(schema: dict[str, Any]) -> dict[str, Any]:
    function = schema.get("function", schema)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("a tool has no name")
    return schema if "function" in schema else {"type": "function", "function": schema}


def refuse_media(row: Mapping[str, Any]) -> None:
    """Raises RowDropped where the row comes with images, audio or video: only text is trained."""
    for column in MEDIA_COLUMNS:
        if row.get(column):
            raise RowDropped(f"it comes with {column}, and only text is trained")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a boolean", str: "a string", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
