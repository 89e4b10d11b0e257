"""Pairs of answers: ``chosen`` and ``rejected``, as whole conversations or as answers to a prompt.

The prompt is in ``prompt``, ``conversations`` or ``messages``, as text or as a list of messages.
Each answer is text, a message, or a list of messages. Lists that do not begin with an assistant message are whole
conversations: their common prefix is the prompt. ``margin`` is a number that reward models use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from halftune.data.formats import fields, turns
from halftune.data.formats.conversation import Conversation, Format, Preference, RowDropped, RowError

PROMPTS = ("prompt", "conversations", "messages")


def _read(row: Mapping[str, Any]) -> Preference:
    answers = {name: _messages(row.get(name), name) for name in ("chosen", "rejected")}
    given = [name for name in PROMPTS if not fields.is_empty(row.get(name))]
    before = _messages(row[given[0]], "prompt", "user") if given else []
    if all(map(_is_whole, answers.values())):
        before = []
    elif not before:
        raise RowError("answers without a prompt", "add a prompt column, or use whole conversations")
    pair = [
        turns.conversation([*before, *one], row, f"prompt and {name}", len(before)) for name, one in answers.items()
    ]
    notes = fields.unread(row, given[1:] if before else given)
    pair[0] = replace(pair[0], notes=(*pair[0].notes, *notes))
    first = _common(pair[0], pair[1])
    if first == len(pair[0].messages) == len(pair[1].messages):
        raise RowDropped("chosen and rejected are identical")
    if any(one.messages[first]["role"] != "assistant" for one in pair if first < len(one.messages)):
        raise RowError("chosen and rejected do not answer the same prompt")
    chosen, rejected = _trained_from(pair[0], first, "chosen"), _trained_from(pair[1], first, "rejected")
    return Preference(chosen, rejected, _margin(row.get("margin")))


def _margin(value: Any) -> float:
    if value is None:
        return 0.0
    try:
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise RowError(f"margin: expected a number, got {value!r}")
    return margin


def _messages(value: Any, column: str, role: str = "assistant") -> list[Any]:
    """A list of messages; text becomes one message of ``role``."""
    value = turns.listed(value, column)
    if value is None:
        raise RowError(f"row without an answer: {column} is missing")
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        return [value]
    if not isinstance(value, list | tuple):
        raise RowError(f"{column}: expected text, a message or a list of messages")
    return list(value)


def _is_whole(messages: list[Any]) -> bool:
    first = messages[0] if messages else None
    name = (first.get("role") or first.get("from")) if isinstance(first, Mapping) else None
    return isinstance(name, str) and turns.ROLES.get(name) not in ("assistant", "function_call", None)


def _common(one: Conversation, other: Conversation) -> int:
    """Length of the common prefix, in messages."""
    pairs = zip(one.messages, other.messages, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _trained_from(made: Conversation, first: int, name: str) -> Conversation:
    """A copy in which only answers from message ``first`` on are trained."""
    answers = [one for one in made.messages[first:] if one["role"] == "assistant"]
    if not any(one["content"].strip() or one.get("tool_calls") for one in answers):
        raise RowDropped(f"the {name} answer is empty")
    return turns.train_from(made, first)


FORMAT = Format("preference", ("chosen", "rejected"), (*PROMPTS, "system", "tools", "margin"), _read, "preference")
