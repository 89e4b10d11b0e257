"""Prompts without an answer: ``prompt``, as a text or a list of messages. Further columns go to the rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halftune.data.formats import fields, turns
from halftune.data.formats.conversation import Conversation, Format, Prompt, RowDropped, RowError

_ANSWER = {"role": "assistant", "content": "-"}  # a conversation has one; it is taken off again


def _read(row: Mapping[str, Any]) -> Prompt:
    if "prompt" not in row:
        raise RowError("row without a prompt: it has no column 'prompt'")
    given = turns.listed(row["prompt"], "prompt")
    if not isinstance(given, list | tuple):
        text = fields.text(row, "prompt")
        if not text.strip():
            raise RowDropped("the prompt is empty")
        given = [{"role": "user", "content": text}]
    made = turns.conversation([*given, _ANSWER], row, "prompt")
    if not made.messages[:-1] or made.messages[-2]["role"] == "assistant":
        raise RowDropped("the prompt ends with an answer")
    return Prompt(Conversation(made.messages[:-1], made.tools, made.train[:-1], made.notes))


FORMAT = Format("prompt", ("prompt",), ("system", "tools"), _read, "prompt")
