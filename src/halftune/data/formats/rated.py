"""Rated answers: a conversation and ``label`` (or ``kto_tag``), true for a good answer.

The conversation is in ``prompt`` and ``completion``, in ``instruction`` and ``output``, or in ``messages`` or
``conversations``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from halftune.data.formats import fields, load_format, turns
from halftune.data.formats.conversation import Conversation, Format, Rated, RowDropped, RowError

LABELS = ("label", "kto_tag")
_FORMS = (  # formats and their columns, the answer's first
    ("prompt_completion", ("completion", "prompt")),
    ("alpaca", ("output", "instruction", "input", "history")),
)
_PLACES = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history")


def _read(row: Mapping[str, Any]) -> Rated:
    good = _good(row)
    made = _conversation(row)
    last = max((i for i, one in enumerate(made.messages) if one["role"] == "assistant"), default=0)
    first = last
    while first and made.messages[first - 1]["role"] in ("assistant", "tool"):
        first -= 1  # an answer with tool calls has several messages
    if not any(one["content"].strip() or one.get("tool_calls") for one in made.messages[first : last + 1]):
        raise RowDropped("the answer is empty")
    return Rated(turns.train_from(made, first), good)


def _good(row: Mapping[str, Any]) -> bool:
    label = next((row[name] for name in LABELS if row.get(name) is not None), None)
    if label is None:
        raise RowError("row without a rating: label is missing", "add a column label with true or false")
    if (good := fields.rating(label)) is None:
        raise RowError(f"label: expected true or false, got {label!r}")
    return good


def _conversation(row: Mapping[str, Any]) -> Conversation:
    form, columns = next(((form, columns) for form, columns in _FORMS if row.get(columns[0]) is not None), ("", ()))
    if form:
        made = load_format(form).read(row)
        assert isinstance(made, Conversation)
    else:
        columns = next(((name,) for name in ("messages", "conversations") if row.get(name)), ())
        if not columns:
            raise RowError("row without an answer", "use the columns prompt and completion, or messages")
        made = turns.conversation(row[columns[0]], row, "messages")
    return replace(made, notes=(*made.notes, *fields.unread(row, [one for one in _PLACES if one not in columns])))


FORMAT = Format("rated", ("label",), (*_PLACES, "system", "tools"), _read, "rated")
