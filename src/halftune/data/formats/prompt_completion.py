"""Rows of ``prompt`` and ``completion``, as texts (one user turn, one answer) or as lists of messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halftune.data.formats import fields, turns
from halftune.data.formats.conversation import Conversation, Format, RowDropped, RowError


def _read(row: Mapping[str, Any]) -> Conversation:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list | tuple) or isinstance(completion, list | tuple):
        return _of_messages(prompt, completion, row)
    fields.refuse_media(row)
    question, answer = fields.text(row, "prompt"), fields.answer(row, "completion")
    if not question.strip():
        raise RowDropped("the prompt is empty")
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if system := fields.text(row, "system"):
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, fields.tools(row), (None,) * len(messages))


def _of_messages(prompt: Any, completion: Any, row: Mapping[str, Any]) -> Conversation:
    """Lists of messages; only messages of the completion are trained."""
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion or []
    if not isinstance(before, list | tuple) or not isinstance(after, list | tuple):
        raise RowError("prompt and completion: expected text or lists of messages")
    if not after:
        raise RowDropped("the answer is empty")
    made = turns.conversation([*before, *after], row, "prompt and completion")
    return turns.train_from(made, len(made.messages) - len(after))


FORMAT = Format("prompt_completion", ("prompt", "completion"), ("system", "tools"), _read)
