"""Turns rows into tokens and labels: read, render, tokenise, mask, make fit. Every row ends up kept or counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from halftune.core.errors import DataError
from halftune.data import overlong
from halftune.data.chat import ChatTemplate
from halftune.data.control import ControlTokens, special_tokens
from halftune.data.conversation import Conversation, RowDropped, RowError
from halftune.data.detect import Reading
from halftune.data.exact import Encoded, ExactTokenizer
from halftune.data.forms import NO_SYSTEM, merge_system
from halftune.data.mask import NEUTRALISED, Rendering, render_turns
from halftune.data.missing import NOT_FINITE, holds_missing, with_nulls
from halftune.data.sample import TokenTurn, WholeSample
from halftune.data.stain import text_ranges

MERGED = "the first token of an answer also holds the end of its header"
PIECES = "documents cut into pieces of max_length"
CHECKED = 3  # rows of every batch whose ids are compared with the tokenizer's own


@dataclass(frozen=True)
class Settings:
    """What tokenising depends on besides the rows and the tokenizer. A cache key is made of all of it.

    Attributes:
        method: ``sft`` or ``pretrain``.
        train_on: as ``method.train_on``.
        max_length: tokens.
        overlong: ``truncate``, ``drop`` or ``error``.
        system: a system message for conversations without one, or None.
        merge_system: whether a system message that the template does not take goes into the first question.
        template_variables: further variables of the chat template.
    """

    method: str
    train_on: str
    max_length: int
    overlong: str
    system: str | None
    merge_system: bool = False
    template_variables: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What became of one row.

    Attributes:
        samples: (ids int32[T], trained bool[T]) of each sample; empty where the row was dropped.
        dropped: why, or "".
        truncated: what was done to make it fit.
        answers_lost: answers to train that were left out to make it fit.
        notes: what else the report counts.
    """

    samples: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    dropped: str = ""
    truncated: tuple[str, ...] = ()
    answers_lost: int = 0
    notes: tuple[str, ...] = ()


class BadRow(Exception):
    """A row that stops training; ``args`` are its position in the batch, what is wrong, and the remedy."""


class RowTokenizer:
    """Tokenises rows of one source.

    Args:
        tokenizer: a fast tokenizer.
        reading: how the rows are read.
        settings: the rest.

    Raises:
        DataError: no chat template; no end-of-sequence token; a tokenizer that is not a fast one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reading: Reading, settings: Settings) -> None:
        self._tokenizer, self._reading, self._settings = tokenizer, reading, settings
        self._template: ChatTemplate | None = None
        plain = reading.format.name == "text"
        if not plain:
            self._template = ChatTemplate(tokenizer, settings.template_variables)
        control = self._template.control if self._template else ControlTokens(special_tokens(tokenizer))
        self._control, self._exact = control, ExactTokenizer(tokenizer, control)
        self._around = _document_ends(tokenizer) if plain else ([], [])

    def tokenize(self, rows: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Tokenises rows.

        Raises:
            BadRow: a row is malformed, or too long where ``overlong`` is ``error``.
        """
        outcomes = [Outcome() for _ in rows]
        rendered: list[tuple[int, Rendering]] = []
        for index, row in enumerate(rows):
            try:
                rendered.append((index, self._render(row)))
            except RowDropped as reason:
                outcomes[index].dropped = reason.reason
            except RowError as error:
                raise BadRow(index, error.what, error.remedy) from error
        encoded = self._exact.encode([rendering.text for _, rendering in rendered])
        for number, ((index, rendering), tokens) in enumerate(zip(rendered, encoded, strict=True)):
            if number < CHECKED:
                self._compare(rendering, tokens)
            self._finish(index, rendering, tokens, outcomes[index])
        return outcomes

    def _render(self, row: Mapping[str, Any]) -> Rendering:
        renamed = self._reading.rename(row)
        if not holds_missing(renamed):
            return self._render_clean(renamed)
        rendering = self._render_clean(with_nulls(renamed))
        return replace(rendering, notes=(*rendering.notes, NOT_FINITE))

    def _render_clean(self, row: Mapping[str, Any]) -> Rendering:
        made = self._reading.format.read(row)
        if isinstance(made, str):
            if self._control.forged(made):
                raise RowDropped("it holds private-use characters (U+F5000 and above) that halftune needs for itself")
            return Rendering(made, (), [], None, (NEUTRALISED,) if self._control.occurs(made) else ())
        assert self._template is not None
        return render_turns(self._template, self._with_system(made), self._settings.train_on)

    def _with_system(self, made: Conversation) -> Conversation:
        assert self._template is not None
        system, forms = self._settings.system, self._template.forms
        if system and made.messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *made.messages]
            made = Conversation(messages, made.tools, (None, *made.train), made.notes)
        if made.messages[0]["role"] == "system" and not forms.system:
            if self._settings.merge_system:
                return merge_system(made)
            if forms.system_refused:
                raise RowDropped(NO_SYSTEM)
        return made

    def _finish(self, index: int, rendering: Rendering, tokens: Encoded, outcome: Outcome) -> None:
        outcome.notes = rendering.notes
        if self._settings.method == "pretrain":
            self._cut_document(tokens.ids, outcome)
            return
        sample = self._mask(rendering, tokens, outcome)
        limit = self._settings.max_length
        try:
            if not sample.trained.any():
                raise RowDropped("no answer in it is to be trained")
            if len(sample.ids) <= limit:
                keep, outcome.truncated = np.ones(len(sample.ids), dtype=bool), ()
            elif self._settings.overlong == "truncate":
                keep, outcome.truncated = overlong.truncate(sample, limit)
                outcome.answers_lost = sum(turn.trained and not keep[turn.start] for turn in sample.turns)
            elif self._settings.overlong == "drop":
                raise RowDropped(f"longer than max_length {limit}")
            else:
                what = f"{len(sample.ids)} tokens are more than data.max_length {limit}"
                raise BadRow(index, what, "raise data.max_length, or set data.overlong to truncate or drop")
            outcome.samples = [(sample.ids[keep], sample.trained[keep])]
        except RowDropped as reason:
            outcome.dropped, outcome.notes = reason.reason, ()

    def _cut_document(self, ids: np.ndarray, outcome: Outcome) -> None:
        first, last = self._around
        whole = np.concatenate([np.array(first, np.int32), ids, np.array(last, np.int32)])
        limit = self._settings.max_length
        pieces = [whole[start : start + limit] for start in range(0, len(whole), limit)]
        if len(pieces) > 1 and len(pieces[-1]) == 1:  # one token alone has nothing to predict
            pieces.pop()
        outcome.samples = [(piece, np.ones(len(piece), dtype=bool)) for piece in pieces]
        if len(pieces) > 1:
            outcome.notes = (*outcome.notes, PIECES)

    def _mask(self, rendering: Rendering, tokens: Encoded, outcome: Outcome) -> WholeSample:
        trained = np.full(len(tokens.ids), self._settings.train_on == "all")
        turns = []
        for turn in rendering.turns:
            # The first token that reaches beyond a place, and the first that begins at or behind it.
            start = int(np.searchsorted(tokens.ends, turn.start, side="right"))
            end, full_end = (int(np.searchsorted(tokens.starts, at, side="left")) for at in (turn.end, turn.full_end))
            if start < len(tokens.ids) and tokens.starts[start] < turn.start and MERGED not in outcome.notes:
                outcome.notes = (*outcome.notes, MERGED)
            if turn.trained:
                trained[start:end] = True
            elif self._settings.train_on == "all":
                trained[start:end] = False
            turns.append(TokenTurn(start, end, full_end, turn.complete, turn.trained))
        for first, last in rendering.untrained:
            at = np.searchsorted(tokens.ends, first, side="right"), np.searchsorted(tokens.starts, last, side="left")
            trained[at[0] : at[1]] = False
        contents: tuple[tuple[int, int], ...] = ()
        if len(tokens.ids) > self._settings.max_length:
            contents = self._contents(rendering, tokens)
        return WholeSample(tokens.ids, tokens.starts, tokens.ends, trained, tuple(turns), contents)

    def _contents(self, rendering: Rendering, tokens: Encoded) -> tuple[tuple[int, int], ...]:
        """Token ranges of the texts of user and tool messages, where the template wrote them out as they are."""
        assert self._template is not None
        found = []
        places = text_ranges(self._template, rendering.messages, rendering.tools, rendering.text)
        for index, (start, end) in places.items():
            first = int(np.searchsorted(tokens.starts, start, side="left"))
            last = int(np.searchsorted(tokens.ends, end, side="right"))
            if last > first and rendering.messages[index]["role"] != "system":
                found.append((first, last))
        return tuple(found)

    def _compare(self, rendering: Rendering, tokens: Encoded) -> None:
        """Our ids are the tokenizer's own wherever no text holds a control token; made sure of, not believed."""
        if NEUTRALISED in rendering.notes:
            return
        expected = self._tokenizer(self._control.readable(rendering.text), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        if list(expected) != tokens.ids.tolist():  # type: ignore[arg-type]
            raise DataError(
                f"the tokenizer {type(self._tokenizer).__name__} gives other ids than its own tokenizer.json",
                where="data",
                remedy="please report this tokenizer; training on other ids than it gives in use would be wrong",
            )


def _document_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids in front of and behind a document: the start token where the tokenizer adds one, and the end token."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token, so documents would run into each other")
    ids = tokenizer("a")["input_ids"]
    starts = tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id  # type: ignore[index]
    return ([tokenizer.bos_token_id] if starts else []), [tokenizer.eos_token_id]  # type: ignore[list-item]
