"""Messages of sharegpt and OpenAI rows: roles, content parts, tool calls, reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from halftune.core.table import did_you_mean
from halftune.data.formats import fields
from halftune.data.formats.conversation import DEVELOPER, ONLY_TEXT, Conversation, RowDropped, RowError
from halftune.data.formats.tool_calls import calls

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
    "ipython": "tool",
    "tool_response": "tool",
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
_ORDER = ("reasoning_content", "content", "tool_calls")  # of the parts of a message in all chat templates
REASONING = ("reasoning_content", "reasoning", "thinking")
CALLS = ("tool_calls", "function_call")  # the second is OpenAI's earlier name
KNOWN = {*MARKS, *REASONING, *CALLS, "name", "tool_call_id"}
_ABOUT_PARTS = {"type", "id", "index", "signature", "cache_control", "annotations", "citations"}  # no text of a part
_PAIRS = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})  # keys by which a message is known
_TEXT_KEYS = ("name", "tool_call_id")
_OPENS = re.compile(r"<think(ing)?>|\[THINK\]")  # public data has closing tags by themselves
_THOUGHT = re.compile(r"\s*(<think>|\[THINK\])?(.*?)(?:</think>|\[/THINK\])", re.DOTALL)


def conversation(turns: Any, row: Mapping[str, Any], column: str, before: int = 0) -> Conversation:
    """Parse a row's list of turns, with either role/content or from/value keys.

    Args:
        turns: the list.
        row: the whole row, for its ``tools``, ``system`` and media.
        column: the list's column, for error messages.
        before: answers among so many first turns are not trained, even if the row marks them.

    Raises:
        RowError: a turn is malformed.
        RowDropped: nothing to train on, or not only text.
    """
    fields.refuse_media(row)
    turns = fields.parse_json(turns, column)
    if not isinstance(turns, list | tuple):
        raise RowError(f"{column}: expected a list of messages")
    messages, train = list[dict[str, Any]](), list[bool | None]()
    unknown: set[str] = set()
    for number, turn in enumerate(turns, start=1):
        message, wish, continues = _plain(turn), None, False
        if message is None:
            where = f"message {number}"
            if not isinstance(turn, Mapping):
                raise RowError(f"{where}: expected an object with role and content")
            message, wish = _message(turn, where), fields.flag(turn, where)
            unknown |= _unknown_keys(turn, message, where)
            # reasoning between an answer and its calls would change its place
            continues = ROLES[turn[_keys(turn)[0]]] == "function_call" and "reasoning_content" not in message
        if number <= before and message["role"] == "assistant":
            wish = False
        if continues and messages and messages[-1]["role"] == "assistant" and train[-1] == wish:
            earlier = messages[-1].get("tool_calls", [])
            messages[-1] = {**message, **messages[-1], "tool_calls": [*earlier, *message["tool_calls"]]}
            continue
        messages.append(message)
        train.append(wish)
    notes = (f"unknown message keys ignored: {_listed(unknown)}",) if unknown else ()
    system = fields.text(row, "system")
    if messages and messages[0]["role"] == "system":
        notes += fields.unread(row, ["system"] if system != messages[0]["content"] else [])
    elif system:
        messages, train = [{"role": "system", "content": system}, *messages], [None, *train]
    if not any(message["role"] == "assistant" for message in messages):
        raise RowDropped("no assistant turn")
    return Conversation(messages, fields.tools(row), tuple(train), notes)


def listed(value: Any, column: str) -> Any:
    """The list of messages that a text holds as JSON; other values are returned unchanged.

    Raises:
        RowError: the JSON has messages, and a duplicate key or a value that JSON does not allow.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found, _ = fields.parse(value)
    except fields.BadJson:
        return value
    known = [isinstance(one, Mapping) and any(one.keys() >= pair for pair in _PAIRS) for one in found]
    return fields.parse_json(value, column) if known and all(known) else value


def train_from(made: Conversation, first: int) -> Conversation:
    """A copy in which answers before message ``first`` are not trained, even if the row marks them."""
    wishes = enumerate(zip(made.messages, made.train, strict=True))
    train = tuple(False if i < first and one["role"] == "assistant" else wish for i, (one, wish) in wishes)
    return replace(made, train=train)


def _unknown_keys(turn: Mapping[str, Any], message: Mapping[str, Any], where: str) -> set[str]:
    """Unknown keys with a value.

    Raises:
        RowError: a likely misspelling of a known key; or the message is empty, and an unknown key has its text.
    """
    known = {*_keys(turn), *KNOWN}
    unknown = {str(key) for key, value in turn.items() if key not in known and not fields.is_empty(value)}
    for key in unknown & _TRAINED_ELSEWHERE:
        raise RowError(f"{where}: unknown key {key!r}", "did you mean train?")
    texts = {key for key in unknown if isinstance(turn[key], str | list | tuple | Mapping)}
    for names, meant, cutoff in ((unknown, MARKS, 0.75), (texts, known, 0.85)):
        for key in sorted(names):
            close = get_close_matches(key.lower(), meant, n=1, cutoff=cutoff)
            if close and (close[0] not in _TEXT_KEYS or isinstance(turn[key], str)):
                raise RowError(f"{where}: unknown key {key!r}", f"did you mean {close[0]}?")
    if texts and _keys(turn)[1] not in turn and not any(map(message.get, ("content", "tool_calls"))):
        raise RowError(f"{where}: unknown key {min(texts)!r}", f"did you mean {_keys(turn)[1]}?")
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
    called = role == "function_call"
    found = {"content": "", "tool_calls": calls(content, where)} if called else _content(content, where, role)
    given = [("tool_calls", calls(turn[key], where)) for key in CALLS if not fields.is_empty(turn.get(key))]
    given += [("reasoning_content", _reasoning(turn[key], f"{where}: {key}")) for key in REASONING if key in turn]
    for key, value in given:
        if value and found.setdefault(key, value) != value:
            raise RowError(f"{where}: {key} stands twice, with different values", "keep one of them")
    for key in found.keys() & {"tool_calls", "reasoning_content"}:
        if role not in ("assistant", "function_call"):
            raise RowError(f"{where}: {key} in a {role} message", "move it to an assistant message")
    if "reasoning_content" in found and _stands_in(found["content"], found["reasoning_content"], where):
        del found["reasoning_content"]
    texts = {key: fields.text(turn, key, f"{where}: ") for key in _TEXT_KEYS}
    return _with_role(turn[_keys(turn)[0]], found | {key: text for key, text in texts.items() if text})


def _reasoning(value: Any, where: str) -> str:
    """Reasoning as a text: a string, null, or a list of parts."""
    if value is None or isinstance(value, str):
        return value or ""
    parts = [_part(part, where) for part in value] if isinstance(value, list | tuple) else [("", value)]
    if not all(PARTS.get(kind) in ("content", "reasoning_content") for kind, _ in parts):
        raise RowError(f"{where}: expected text or a list of texts")
    return "".join(text for _, text in parts)


def _stands_in(content: str, reasoning: str, where: str) -> bool:
    """Whether a text begins with this reasoning as a block of its own.

    Raises:
        RowError: it opens a block of other reasoning.
    """
    block = _THOUGHT.match(content)
    if block and block[2].strip() == reasoning.strip():
        return True
    if reasoning.strip() and (tag := _OPENS.search(content)):
        raise RowError(f"{where}: {tag[0]} in the content, and other reasoning beside it", "keep one of them")
    return False


def _with_role(given: str, message: dict[str, Any]) -> dict[str, Any]:
    """The message with its role; one of a developer counts as a system message, and keeps a mark."""
    mark = {DEVELOPER: True} if given == "developer" else {}
    role = "assistant" if ROLES[given] == "function_call" else ROLES[given]
    return {"role": role, **message, **mark}


def _keys(turn: Mapping[str, Any]) -> tuple[str, str]:
    """The keys of role and content: OpenAI's or sharegpt's."""
    is_sharegpt = turn.get("role") is None and turn.get("from") is not None
    return ("from", "value") if is_sharegpt else ("role", "content")


def _role(turn: Mapping[str, Any], where: str) -> str:
    key = _keys(turn)[0]
    if key not in turn:
        raise RowError(f"{where} has neither role nor from")
    role = ROLES.get(turn[key]) if isinstance(turn[key], str) else None
    if role is None:
        raise RowError(f"{where}: unknown role {turn[key]!r}", did_you_mean(str(turn[key]), ROLES))
    return role


def _content(value: Any, where: str, role: str) -> dict[str, Any]:
    """Message keys from a content: a string, null, or a list of parts ``{"type": …, "text" or "value": …}``.

    The result of a tool may be another object or list, which becomes JSON.
    """
    if value is None or isinstance(value, str):
        return {"content": value or ""}
    if role == "tool" and not _are_parts(value):
        return {"content": json.dumps(value, ensure_ascii=False)}
    if not isinstance(value, list | tuple):
        raise RowError(f"{where}: content: expected text or a list of parts")
    found: dict[str, Any] = {"content": ""}
    for part in value:
        kind, inner = _part(part, where)
        key, inner = PARTS[kind], calls(inner, where) if kind == "tool_call" else inner
        later = [name for name in _ORDER[_ORDER.index(key) + 1 :] if str(found.get(name, "")).strip()]
        if later and str(inner).strip():
            what = f"{where}: a part of type {kind!r} after {later[0]}; chat templates write it before"
            raise RowError(what, "split the message: reasoning, text and tool calls, in this order, in each one")
        found[key] = found[key] + inner if key in found else inner
    return found


def _are_parts(value: Any) -> bool:
    """Whether a value is a list of content parts: texts, or objects with a known type or a text."""
    if not isinstance(value, list | tuple):
        return False
    objects = [one for one in value if not isinstance(one, str)]
    kinds = [one.get("type", "text" if "text" in one else "") if isinstance(one, Mapping) else "" for one in objects]
    return all(kind in (*PARTS, *MEDIA_PARTS) for kind in kinds)


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
    texts = [key for key in ("text", "value", kind) if part.get(key) is not None]
    key = next((key for key in texts if not fields.is_empty(part[key])), texts[0] if texts else None)
    if key is None:
        raise RowError(f"{where}: a part of type {kind!r} has neither text nor value")
    if not isinstance(part[key], str) and kind != "tool_call":
        raise RowError(f"{where}: {key} of a content part: expected text")
    fields.refuse_unread(part, {key, *_ABOUT_PARTS}, f"{where}: content part")
    return kind, part[key]
