"""Messages of sharegpt and OpenAI rows: roles, contents in parts, tool calls, reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from halftune.core.table import did_you_mean
from halftune.data.conversation import Conversation, RowDropped, RowError
from halftune.data.formats import fields

ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "function_call",
    "tool_call": "function_call",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
    "tool": "tool",
}
MEDIA_PARTS = ("image", "image_url", "audio", "input_audio", "video", "video_url")
MARKS = ("train", "weight")
REASONING = ("reasoning_content", "reasoning", "thinking")
KNOWN = {*MARKS, *REASONING, "tool_calls", "function_call", "name", "tool_call_id"}


def conversation(turns: Any, row: Mapping[str, Any], column: str) -> Conversation:
    """Makes a conversation of a row's list of turns, whether they say role/content or from/value.

    Args:
        turns: the list.
        row: the whole row, for its ``tools``, ``system`` and media.
        column: the list's column, for messages.

    Raises:
        RowError: a turn is malformed.
        RowDropped: there is nothing to train on, or it needs more than text.
    """
    fields.refuse_media(row)
    turns = fields.parse_json(turns, column)
    if not isinstance(turns, list | tuple):
        raise RowError(f"{column} should be a list of messages")
    messages, train = [], []
    unknown: set[str] = set()
    for number, turn in enumerate(turns, start=1):
        where = f"message {number}"
        if not isinstance(turn, Mapping):
            raise RowError(f"{where} should be an object with role and content")
        message = _message(turn, where)
        messages.append(message)
        train.append(fields.flag(turn, where))
        unknown |= _unknown_keys(turn, where)
    system = fields.text(row, "system")
    if system and (not messages or messages[0]["role"] != "system"):
        messages, train = [{"role": "system", "content": system}, *messages], [None, *train]
    if not any(message["role"] == "assistant" for message in messages):
        raise RowDropped("no assistant turn")
    notes = (f"unknown message keys: {_listed(unknown)} (they change nothing)",) if unknown else ()
    return Conversation(messages, fields.tools(row), tuple(train), notes)


def _unknown_keys(turn: Mapping[str, Any], where: str) -> set[str]:
    """Keys that nothing reads; null under a key is the same as no key.

    Raises:
        RowError: one of them is nearly ``train`` or ``weight``: what it asks for would not happen.
    """
    known = {*(("role", "content") if "role" in turn else ("from", "value")), *KNOWN}
    unknown = {str(key) for key, value in turn.items() if key not in known and value is not None}
    for key in unknown:
        if meant := get_close_matches(key.lower(), MARKS, n=1, cutoff=0.75):
            raise RowError(f"{where}: unknown key {key!r}", f"did you mean {meant[0]}? It says whether to train this")
    return unknown


def _listed(keys: set[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _message(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    if role_key not in turn:
        raise RowError(f"{where} has neither role nor from")
    name = turn[role_key]
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError(f"{where}: unknown role {name!r}", did_you_mean(str(name), ROLES))
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": calls(turn.get(content_key), where)}
    message: dict[str, Any] = {"role": role, **_content(turn.get(content_key), where)}
    for key in ("tool_calls", "function_call"):  # the second is OpenAI's earlier name for a single one
        if turn.get(key):
            message["tool_calls"] = calls(turn[key], where)
            break
    for key in REASONING:
        if isinstance(turn.get(key), str) and turn[key]:
            message["reasoning_content"] = turn[key]
            break
    for key in ("name", "tool_call_id"):
        if isinstance(turn.get(key), str):
            message[key] = turn[key]
    return message


def _content(value: Any, where: str) -> dict[str, Any]:
    """The keys that a content brings: a string, null, or a list of parts ``{"type": …, "text" or "value": …}``."""
    if value is None or isinstance(value, str):
        return {"content": value or ""}
    if not isinstance(value, list | tuple):
        raise RowError(f"{where}: content should be a text or a list of parts")
    texts, reasoning, tool_calls = [], [], []
    for part in value:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind in MEDIA_PARTS:
            raise RowDropped(f"it holds {kind} parts, and only text is trained")
        inner = part if isinstance(part, str) else _part_text(part, kind, where)
        if kind in ("reasoning", "thinking"):
            reasoning.append(inner)
        elif kind == "tool_call":
            tool_calls += calls(inner, where)
        elif kind == "text":
            texts.append(inner)
        else:
            raise RowError(
                f"{where}: unknown part {kind!r}", did_you_mean(str(kind), ("text", "reasoning", "tool_call"))
            )
    found: dict[str, Any] = {"content": "".join(texts)}
    if reasoning:
        found["reasoning_content"] = "".join(reasoning)
    if tool_calls:
        found["tool_calls"] = tool_calls
    return found


def _part_text(part: Any, kind: str, where: str) -> Any:
    if not isinstance(part, Mapping):
        raise RowError(f"{where}: a part should be a text or an object")
    for key in ("text", "value", kind):
        if part.get(key) is not None:
            if not isinstance(part[key], str) and kind != "tool_call":
                raise RowError(f"{where}: the {key} of a part should be a text")
            return part[key]
    raise RowError(f"{where}: a part of type {kind!r} has neither text nor value")


def calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls in the form that templates take: ``{"type": "function", "function": {"name", "arguments": {…}}}``.

    Raises:
        RowError: not valid JSON, or not an object with a name and arguments.
    """
    parsed = fields.parse_json(value, f"{where}: tool call")
    return [_call(call, where) for call in (parsed if isinstance(parsed, list | tuple) else [parsed])]


def _call(value: Any, where: str) -> dict[str, Any]:
    value = fields.parse_json(value, f"{where}: tool call")
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(f"{where}: a tool call needs a name and arguments")
    arguments = function.get("arguments")
    arguments = fields.parse_json({} if arguments in (None, "") else arguments, f"{where}: arguments of a tool call")
    if not isinstance(arguments, Mapping):
        raise RowError(f"{where}: the arguments of a tool call should be an object")
    call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return {"id": value["id"], **call} if isinstance(value.get("id"), str) else call
