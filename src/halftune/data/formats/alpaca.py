"""alpaca rows: ``instruction``, ``output``, optional ``input``, ``system`` and ``history``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halftune.data.formats import fields
from halftune.data.formats.conversation import Conversation, Format, RowDropped, RowError


def _read(row: Mapping[str, Any]) -> Conversation:
    fields.refuse_media(row)
    instruction, extra = fields.text(row, "instruction"), fields.text(row, "input")
    answer = fields.answer(row, "output")
    question = "\n".join(part for part in (instruction, extra) if part.strip())
    if not question:
        raise RowDropped("the instruction is empty")
    messages = [*_history(row), {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if system := fields.text(row, "system"):
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, fields.tools(row), (None,) * len(messages))


def _history(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Earlier exchanges, a list of [question, answer] pairs."""
    wrong = RowError("history: expected a list of [question, answer] pairs")
    given, messages = row.get("history"), list[dict[str, Any]]()
    pairs = [] if fields.is_empty(given) else fields.parse_json(given, "history")
    if not isinstance(pairs, list | tuple):
        raise wrong
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise wrong
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages


FORMAT = Format("alpaca", ("instruction", "output"), ("input", "system", "history", "tools"), _read)
