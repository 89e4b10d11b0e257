"""Tokenises prompts that the model answers in training: the text up to the answer, and the row for the rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from halftune.data.encode.offset_tokenizer import Encoded
from halftune.data.encode.tokenize import Outcome, RowTokenizer
from halftune.data.formats.conversation import Conversation, Prompt, Record, RowDropped
from halftune.data.formats.fields import with_nulls
from halftune.data.store import Example, Segment
from halftune.data.templates.control_tokens import texts_of
from halftune.data.templates.loss_mask import NEUTRALISED, Rendering, lost_in_prompt
from halftune.data.templates.omitted_text import LOSSES
from halftune.data.templates.render import ChatTemplate


def as_prompt(made: Record) -> tuple[Conversation, str | None]:
    """The messages before the last answer, and that answer's text; None for a row without one.

    Raises:
        RowDropped: nothing stands before the answer.
    """
    if isinstance(made, Prompt):
        return made.conversation, None
    assert isinstance(made, Conversation)
    last = max(i for i, one in enumerate(made.messages) if one["role"] == "assistant")
    first = last
    while first and made.messages[first - 1]["role"] in ("assistant", "tool"):
        first -= 1
    if not first or made.messages[first - 1]["role"] == "system":
        raise RowDropped("there is no prompt before the answer")
    answer = str(made.messages[last]["content"])
    return replace(made, messages=made.messages[:first], train=made.train[:first]), answer


def render_prompt(template: ChatTemplate, made: Conversation) -> Rendering:
    """The text of a prompt, with the beginning of the answer.

    Args:
        template: the chat template.
        made: the prompt.

    Raises:
        RowDropped: the template rejects the messages.
    """
    made = template.features.of_conversation(made)
    said = texts_of([made.messages, made.tools])
    if template.control.has_private_characters(said):
        raise RowDropped("row with private-use characters (U+F5000 and above), which halftune reserves")
    messages, tools = template.control.mark(made.messages), template.control.mark(made.tools)
    notes = [*made.notes, *((NEUTRALISED,) if template.control.occurs(said) else ())]
    notes += lost_in_prompt(template, made, messages, tools)
    return Rendering(template.render(messages, tools, prompt=True), (), messages, tools, tuple(notes))


class PromptTokenizer(RowTokenizer):
    """Tokenises the rows of one source up to their answers; nothing has labels."""

    def _render(self, row: Mapping[str, Any], outcome: Outcome) -> tuple[Rendering, ...]:
        assert self._template is not None
        asked, answer = as_prompt(self._reading.format.read(with_nulls(self._reading.rename(row))))
        found = render_prompt(self._template, self._with_system(asked))
        if self._settings.on_lost_text == "drop" and (lost := [one for one in found.notes if one in LOSSES]):
            raise RowDropped(lost[0])
        # rewards read the row's answer as its column ``answer``, if it has no such column
        outcome.row = row if answer is None or "answer" in row else {**row, "answer": answer}
        return (found,)

    def _finish(self, index: int, renderings: Sequence[Rendering], tokens: Sequence[Encoded], outcome: Outcome) -> None:
        (rendering,), (encoded,) = renderings, tokens
        outcome.characters, outcome.lost = len(rendering.text), encoded.lost
        if len(encoded.ids) > self._settings.max_length:
            outcome.dropped = "longer than max_length: the prompt leaves no room for an answer"
            return
        outcome.notes = rendering.notes
        unlabelled = np.zeros(len(encoded.ids), dtype=bool)
        outcome.examples = [Example((Segment(encoded.ids, unlabelled),), row=outcome.row)]
