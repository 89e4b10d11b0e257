"""Rows of ``prompt`` and ``completion``, as texts (one user turn, one answer) or as lists of messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halftune.data.formats import fields, turns
from halftune.data.formats.conversation import Conversation, Format, RowDropped


def _read(row: Mapping[str, Any]) -> Conversation:
    given = {name: turns.listed(row[name], name) for name in ("prompt", "completion") if name in row}
    if any(isinstance(value, list | tuple) for value in given.values()):
        return _of_messages({**row, **given})
    fields.refuse_media(row)
    question, answer = fields.answer(row, "prompt", "a prompt"), fields.answer(row, "completion")
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if system := fields.text(row, "system"):
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, fields.tools(row), (None,) * len(messages))


def _of_messages(row: Mapping[str, Any]) -> Conversation:
    """Lists of messages; only messages of the completion are trained."""
    before, after = _messages(row, "prompt", "user"), _messages(row, "completion", "assistant")
    if not after:
        raise RowDropped("the answer is empty")
    return turns.conversation([*before, *after], row, "prompt and completion", len(before))


def _messages(row: Mapping[str, Any], column: str, role: str) -> list[Any]:
    value = row.get(column)
    if isinstance(value, list | tuple):
        return list(value)
    return [] if fields.is_empty(value) else [{"role": role, "content": fields.text(row, column)}]


FORMAT = Format("prompt_completion", ("prompt", "completion"), ("system", "tools"), _read)
