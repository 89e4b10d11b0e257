"""Tokenises prompts that the model answers in training: the text up to the answer, and the row for the rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from halftune.data.encode.offset_tokenizer import Encoded
from halftune.data.encode.tokenize import Outcome, RowTokenizer
from halftune.data.formats.conversation import TOO_LONG, Conversation, Prompt, Record, RowDropped
from halftune.data.formats.fields import MEDIA_COLUMNS, with_nulls
from halftune.data.store import Example, Segment
from halftune.data.templates.control_tokens import MEDIA, texts_of
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
    answer, kept = str(made.messages[last]["content"]), made.messages[:first]
    media = sum(str(one["content"]).count(character) for one in kept for character in MEDIA)
    return replace(made, messages=kept, train=made.train[:first], media=made.media[:media]), answer


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
        renamed = with_nulls(self._reading.rename(row))
        asked, answer = as_prompt(self._read(renamed))
        found = self._with_media(render_prompt(self._template, self._with_system(asked)), asked)
        if self._settings.on_lost_text == "drop" and (lost := [one for one in found.notes if one in LOSSES]):
            raise RowDropped(lost[0])
        # rewards read the row's answer as its column ``answer``, if it has no such column
        kept = {name: value for name, value in row.items() if self._images is None or name not in MEDIA_COLUMNS}
        outcome.row = kept if answer is None or "answer" in row else {**kept, "answer": answer}
        return (found,)

    def _finish(self, index: int, renderings: Sequence[Rendering], tokens: Sequence[Encoded], outcome: Outcome) -> None:
        (rendering,), (encoded,) = renderings, tokens
        outcome.characters, outcome.lost = len(rendering.text), encoded.lost
        if len(encoded.ids) > self._settings.max_length:
            outcome.dropped = f"{TOO_LONG}: the prompt leaves no room for an answer"
            return
        outcome.notes = rendering.notes
        unlabelled = np.zeros(len(encoded.ids), dtype=bool)
        outcome.examples = [Example((Segment(encoded.ids, unlabelled, rendering.media),), row=outcome.row)]
