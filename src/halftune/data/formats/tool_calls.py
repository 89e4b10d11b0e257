"""Tool calls of rows in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halftune.data.formats import fields
from halftune.data.formats.conversation import RowError

ARGUMENTS = ("arguments", "parameters", "params", "args", "kwargs", "input")  # names of the arguments in data sets
_ABOUT = {"id", "call_id", "type", "index", "status"}  # keys that no chat template shows as text of the call


def calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls as chat templates expect them: ``{"type": "function", "function": {"name", "arguments": {…}}}``.

    Raises:
        RowError: not valid JSON, or not an object with a name and arguments only.
    """
    parsed = fields.parse_json(value, f"{where}: tool call")
    return [_call(call, where) for call in (parsed if isinstance(parsed, list | tuple) else [parsed])]


def _call(value: Any, where: str) -> dict[str, Any]:
    value = fields.parse_json(value, f"{where}: tool call")
    function = (value.get("function") or value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(f"{where}: a tool call needs a name and arguments")
    if function is not value:
        same = {"name"} if value.get("name") == function["name"] else set[str]()
        fields.refuse_unread(value, {"function", *same, *_ABOUT}, f"{where}: tool call")
    fields.refuse_unread(function, {"name", "function", *ARGUMENTS, *_ABOUT}, f"{where}: tool call")
    found = {"name": function["name"], "arguments": _arguments(function, where)}
    given = next((text for key in ("id", "call_id") if (text := fields.text(value, key, f"{where}: "))), "")
    return {**({"id": given} if given else {}), "type": "function", "function": found}


def _arguments(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = [name for name in ARGUMENTS if not fields.is_empty(function.get(name))]
    if len(given) > 1:
        raise RowError(f"{where}: a tool call with {' and '.join(given)}", "keep one of them")
    found = fields.parse_json(function[given[0]], f"{where}: arguments of a tool call") if given else {}
    if not isinstance(found, Mapping):
        raise RowError(f"{where}: arguments of a tool call: expected an object")
    return dict(found)
