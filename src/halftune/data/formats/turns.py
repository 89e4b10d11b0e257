"""Messages of sharegpt and OpenAI rows: roles, content parts, tool calls, reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from halftune.core.table import did_you_mean
from halftune.data.formats import fields
from halftune.data.formats.conversation import DEVELOPER, ONLY_TEXT, Conversation, RowDropped, RowError

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
PARTS = {
    "text": "content",
    "reasoning": "reasoning_content",
    "thinking": "reasoning_content",
    "tool_call": "tool_calls",
}  # types of content parts → keys of the message
MARKS = ("train", "weight")
_TRAINED_ELSEWHERE = {"loss", "loss_mask", "trainable"}  # other frameworks' names for train
REASONING = ("reasoning_content", "reasoning", "thinking")
KNOWN = {*MARKS, *REASONING, "tool_calls", "function_call", "name", "tool_call_id"}


def conversation(turns: Any, row: Mapping[str, Any], column: str) -> Conversation:
    """Parse a row's list of turns, with either role/content or from/value keys.

    Args:
        turns: the list.
        row: the whole row, for its ``tools``, ``system`` and media.
        column: the list's column, for error messages.

    Raises:
        RowError: a turn is malformed.
        RowDropped: nothing to train on, or not only text.
    """
    fields.refuse_media(row)
    turns = fields.parse_json(turns, column)
    if not isinstance(turns, list | tuple):
        raise RowError(f"{column}: expected a list of messages")
    messages, train = [], []
    unknown: set[str] = set()
    for number, turn in enumerate(turns, start=1):
        if plain := _plain(turn):
            messages.append(plain)
            train.append(None)
            continue
        where = f"message {number}"
        if not isinstance(turn, Mapping):
            raise RowError(f"{where}: expected an object with role and content")
        message = _message(turn, where)
        messages.append(message)
        train.append(fields.flag(turn, where))
        unknown |= _unknown_keys(turn, where)
    system = fields.text(row, "system")
    if system and (not messages or messages[0]["role"] != "system"):
        messages, train = [{"role": "system", "content": system}, *messages], [None, *train]
    if not any(message["role"] == "assistant" for message in messages):
        raise RowDropped("no assistant turn")
    notes = (f"unknown message keys ignored: {_listed(unknown)}",) if unknown else ()
    return Conversation(messages, fields.tools(row), tuple(train), notes)


def train_from(made: Conversation, first: int) -> Conversation:
    """A copy in which answers before message ``first`` are not trained, even if the row marks them."""
    wishes = enumerate(zip(made.messages, made.train, strict=True))
    train = tuple(False if i < first and one["role"] == "assistant" else wish for i, (one, wish) in wishes)
    return replace(made, train=train)


def _unknown_keys(turn: Mapping[str, Any], where: str) -> set[str]:
    """Unknown keys with a value other than null.

    Raises:
        RowError: a likely misspelling of ``train`` or ``weight``.
    """
    known = {*_keys(turn), *KNOWN}
    unknown = {str(key) for key, value in turn.items() if key not in known and value is not None}
    for key in unknown & _TRAINED_ELSEWHERE:
        raise RowError(f"{where}: unknown key {key!r}", "did you mean train?")
    for key in unknown:
        if meant := get_close_matches(key.lower(), MARKS, n=1, cutoff=0.75):
            raise RowError(f"{where}: unknown key {key!r}", f"did you mean {meant[0]}?")
    return unknown


def _listed(keys: set[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _plain(turn: Any) -> dict[str, Any] | None:
    """The message of a turn with a role and a text alone, as most are; None for other turns."""
    if type(turn) is not dict or len(turn) != 2:
        return None
    role, content = (turn["role"], turn.get("content")) if "role" in turn else (turn.get("from"), turn.get("value"))
    if type(role) is not str or type(content) is not str or role not in ROLES or ROLES[role] == "function_call":
        return None
    return _with_role(role, {"content": content})


def _message(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    role, content = _role(turn, where), turn.get(_keys(turn)[1])
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": calls(content, where)}
    message = _with_role(turn[_keys(turn)[0]], _content(content, where))
    if called := turn.get("tool_calls") or turn.get("function_call"):  # the second is OpenAI's earlier name
        message["tool_calls"] = calls(called, where)
    texts = {key: value for key, value in turn.items() if isinstance(value, str)}
    if reasoning := next(filter(None, map(texts.get, REASONING)), ""):
        message["reasoning_content"] = reasoning
    return message | {key: texts[key] for key in ("name", "tool_call_id") if key in texts}


def _with_role(given: str, message: dict[str, Any]) -> dict[str, Any]:
    """The message with its role; one of a developer counts as a system message, and keeps a mark."""
    mark = {DEVELOPER: True} if given == "developer" else {}
    return {"role": ROLES[given], **message, **mark}


def _keys(turn: Mapping[str, Any]) -> tuple[str, str]:
    """The keys of role and content: OpenAI's or sharegpt's."""
    return ("role", "content") if "role" in turn else ("from", "value")


def _role(turn: Mapping[str, Any], where: str) -> str:
    key = _keys(turn)[0]
    if key not in turn:
        raise RowError(f"{where} has neither role nor from")
    role = ROLES.get(turn[key]) if isinstance(turn[key], str) else None
    if role is None:
        raise RowError(f"{where}: unknown role {turn[key]!r}", did_you_mean(str(turn[key]), ROLES))
    return role


def _content(value: Any, where: str) -> dict[str, Any]:
    """Message keys from a content: a string, null, or a list of parts ``{"type": …, "text" or "value": …}``."""
    if value is None or isinstance(value, str):
        return {"content": value or ""}
    if not isinstance(value, list | tuple):
        raise RowError(f"{where}: content: expected text or a list of parts")
    found: dict[str, Any] = {"content": ""}
    for part in value:
        kind, inner = _part(part, where)
        key, inner = PARTS[kind], calls(inner, where) if kind == "tool_call" else inner
        found[key] = found[key] + inner if key in found else inner
    return found


def _part(part: Any, where: str) -> tuple[str, Any]:
    """Type and value of a content part."""
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, Mapping):
        raise RowError(f"{where}: content part: expected text or an object")
    kind = str(part.get("type", "text"))
    if kind in MEDIA_PARTS:
        raise RowDropped(f"row with {kind} parts: {ONLY_TEXT}")
    if kind not in PARTS:
        raise RowError(f"{where}: unknown part {kind!r}", did_you_mean(kind, PARTS))
    key = next((key for key in ("text", "value", kind) if part.get(key) is not None), None)
    if key is None:
        raise RowError(f"{where}: a part of type {kind!r} has neither text nor value")
    if not isinstance(part[key], str) and kind != "tool_call":
        raise RowError(f"{where}: {key} of a content part: expected text")
    return kind, part[key]


def calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls as chat templates expect them: ``{"type": "function", "function": {"name", "arguments": {…}}}``.

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
        raise RowError(f"{where}: arguments of a tool call: expected an object")
    call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return {"id": value["id"], **call} if isinstance(value.get("id"), str) else call
