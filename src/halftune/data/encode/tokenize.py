"""Converts rows to tokens and labels: parse, render, tokenise, mask, truncate; in this process or in workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from halftune.core.errors import DataError
from halftune.core.processes.time_limit import OutOfTime
from halftune.data.encode.offset_tokenizer import Encoded, OffsetTokenizer
from halftune.data.encode.settings import Settings
from halftune.data.encode.truncate import SPLIT, answers_in_proportion, cut, same_prompt
from halftune.data.formats.conversation import (
    TOO_LONG,
    BadRow,
    Conversation,
    Preference,
    Prompted,
    Rated,
    Record,
    RowDropped,
    RowError,
)
from halftune.data.formats.detect import Reading
from halftune.data.formats.fields import NOT_FINITE, holds_missing, with_nulls
from halftune.data.store import Example, Segment, TokenTurn, WholeSample
from halftune.data.templates.assistant_turns import Turn
from halftune.data.templates.control_tokens import ControlTokens, special_tokens
from halftune.data.templates.features import fit_system, without_system
from halftune.data.templates.loss_mask import NEUTRALISED, Rendering, render_turns, with_placeholders
from halftune.data.templates.message_placeholders import text_ranges
from halftune.data.templates.omitted_text import LOSSES
from halftune.data.templates.render import ChatTemplate, conversation_limits, too_much

MERGED = "the first token of an answer includes the end of its header"
PIECES = "documents cut into pieces of max_length"
EQUAL = "chosen and rejected have the same tokens"
EQUAL_CUT = f"{TOO_LONG}: chosen and rejected have the same tokens after the cut"
_BYTES = 16  # upper bound of the memory per rendered character
CHECKED = 3  # rows per batch whose ids are compared with the tokenizer's own


@dataclass
class Outcome:
    """The result of one row.

    Attributes:
        examples, dropped: training examples; none and the reason if the row was dropped.
        truncated, notes: descriptions of cuts, and of other changes that the report counts.
        answers_lost: trained answers dropped by truncation.
        characters, lost: number of rendered characters, and those that the tokenizer cannot represent.
        columns: numbers that the method reads.
        row: of a prompt, for its rewards.
        files: of a dropped row, the places of its media.
    """

    examples: list[Example] = field(default_factory=list)
    dropped: str = ""
    truncated: tuple[str, ...] = ()
    answers_lost: int = 0
    notes: tuple[str, ...] = ()
    characters: int = 0
    lost: str = ""
    columns: dict[str, float] = field(default_factory=dict)
    row: Mapping[str, Any] | None = None
    files: Mapping[str, Any] = field(default_factory=dict)


class RowTokenizer:
    """Tokenises rows of one source.

    Args:
        tokenizer: a fast tokenizer.
        reading: format and columns of the rows.
        settings: the settings.

    Raises:
        DataError: no chat template, no end-of-sequence token, or not a fast tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reading: Reading, settings: Settings) -> None:
        self._tokenizer, self._reading, self._settings = tokenizer, reading, settings
        self._template: ChatTemplate | None = None
        plain = reading.format.name in ("text", "prompted")
        if not plain:
            day = date.fromisoformat(settings.day) if settings.day else None
            images = settings.images is not None
            self._template = ChatTemplate(tokenizer, settings.template_variables, day, images=images)
        control = self._template.control if self._template else ControlTokens(special_tokens(tokenizer))
        self._control, self._exact = control, OffsetTokenizer(tokenizer, control)
        self._ends = settings.ends_with_labels(tokenizer)
        self._is_document = reading.format.record == "document"
        self._around = _document_ends(tokenizer) if plain else ([], [])
        self._ends_of_documents = tuple(np.array(ids, np.int32) for ids in self._around)
        self._images = None
        if settings.images is not None:
            from halftune.data.media.placeholders import Placeholders  # few runs have images

            self._images = Placeholders(settings.images, tokenizer, control)

    def tokenize(self, rows: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Tokenise rows.

        Raises:
            BadRow: a row is malformed, or too long where ``overlong`` is ``error``.
        """
        outcomes = [Outcome() for _ in rows]
        rendered = self._render_all(rows, outcomes)
        pieces = [piece for renderings in rendered.values() for one in renderings for piece in one.pieces]
        encoded = self._exact.encode(pieces, placed=not self._is_document)
        for number, (index, renderings) in enumerate(rendered.items()):
            tokens = [self._joined(one, [next(encoded) for _ in one.pieces]) for one in renderings]
            for rendering, own in zip(renderings, tokens, strict=True) if number < CHECKED else ():
                self._compare(rendering, own)
            self._finish(index, renderings, tokens, outcomes[index])
            if outcomes[index].dropped and self._images is not None:
                outcomes[index].files = self._images.places(renderings)
        return outcomes

    def _render_all(
        self, rows: Sequence[Mapping[str, Any]], outcomes: Sequence[Outcome]
    ) -> dict[int, tuple[Rendering, ...]]:
        """Renderings by the index of their row; the reason of a dropped row is set in its outcome."""
        rendered: dict[int, tuple[Rendering, ...]] = {}
        before: tuple[Rendering, ...] = ()
        with conversation_limits() as limits:
            for index, row in enumerate(rows):
                limits.renew(_BYTES * sum(len(one.text) for one in before))
                try:
                    before = rendered[index] = with_placeholders(self._render(row, outcomes[index]))
                except RowDropped as reason:
                    outcomes[index].dropped, outcomes[index].files = reason.reason, reason.files
                except RowError as error:
                    raise BadRow(index, error.what, error.remedy, error.code) from error
                except (OutOfTime, MemoryError) as error:
                    raise BadRow(index, *too_much(error).args, "model.chat_template_too_costly") from error
        return rendered

    def _render(self, row: Mapping[str, Any], outcome: Outcome) -> tuple[Rendering, ...]:
        """One rendering per segment of the example; the columns are set in the outcome."""
        renamed = self._reading.rename(row)
        if missing := holds_missing(renamed):
            renamed = with_nulls(renamed)
        made = self._read(renamed)
        if isinstance(made, Preference) and self._settings.margins:
            outcome.columns = {"margin": made.margin}
        elif isinstance(made, Rated):
            outcome.columns = {"label": float(made.good)}
        found = self._segments(made)
        return tuple(one._replace(notes=(*one.notes, NOT_FINITE)) for one in found) if missing else found

    def _read(self, renamed: Mapping[str, Any]) -> Record:
        return self._reading.format.read(renamed) if self._images is None else self._images.read(self._reading, renamed)

    def _with_media(self, found: Rendering, made: Conversation) -> Rendering:
        return self._images.expand(found, made.media) if made.media and self._images is not None else found

    def _segments(self, made: Record) -> tuple[Rendering, ...]:
        if isinstance(made, str):
            return (self._render_document(made),)
        if isinstance(made, Prompted):
            from halftune.data.encode.prompt_and_answer import render_prompted  # rare

            return (render_prompted(made, self._control),)
        if isinstance(made, Preference):
            return self._render_turns(made.chosen), self._render_turns(made.rejected)
        if isinstance(made, Rated):
            return (self._render_turns(made.conversation),)
        assert isinstance(made, Conversation)
        return (self._render_turns(made),)

    def _render_document(self, text: str) -> Rendering:
        if self._control.has_private_characters(text):
            raise RowDropped("row with private-use characters (U+F5000 and above), which halftune reserves")
        return Rendering(text, (), [], None, (NEUTRALISED,) if self._control.occurs(text) else ())

    def _joined(self, rendering: Rendering, pieces: Sequence[Encoded]) -> Encoded:
        if not rendering.split:
            return pieces[0]
        from halftune.data.encode.prompt_and_answer import joined  # seldom used

        return joined(rendering, pieces, *self._around)

    def _render_turns(self, made: Conversation) -> Rendering:
        assert self._template is not None
        found = render_turns(self._template, self._with_system(made), self._settings.train_on, self._ends)
        if self._settings.on_lost_text == "drop" and (lost := [one for one in found.notes if one in LOSSES]):
            raise RowDropped(lost[0])
        return self._with_media(found, made)

    def for_template(self, made: Conversation) -> Conversation:
        """A conversation as the chat template takes it: with the recipe's system message, and ids of tool calls.

        Raises:
            RowDropped: the template refuses system messages.
        """
        assert self._template is not None
        return self._template.features.of_conversation(self._with_system(made))

    def _with_system(self, made: Conversation) -> Conversation:
        assert self._template is not None
        settings = self._settings
        if settings.drop_system:
            made = without_system(made)
        if settings.system and made.messages[0]["role"] != "system":
            messages = [{"role": "system", "content": settings.system}, *made.messages]
            made = replace(made, messages=messages, train=(None, *made.train))
        return fit_system(made, self._template.features, merge=settings.merge_system)

    def _finish(self, index: int, renderings: Sequence[Rendering], tokens: Sequence[Encoded], outcome: Outcome) -> None:
        outcome.characters, outcome.lost = sum([len(one.text) for one in renderings]), "".join([t.lost for t in tokens])
        outcome.notes = tuple(dict.fromkeys([note for one in renderings for note in one.notes]))
        if self._settings.documents and not renderings[0].split:
            self._cut_document(tokens[0].ids, outcome)
            return
        try:
            masked = list(map(self._mask, renderings, tokens, [outcome] * len(tokens)))
            if len(masked) > 1 and self._settings.overlong == "proportional":
                segments = self._fit_answers(masked, outcome, [one.media for one in renderings])
            else:
                pairs = zip(masked, renderings, strict=True)
                segments = [self._fit(index, one, outcome, of.media) for one, of in pairs]
                if len(segments) > 1 and outcome.truncated:
                    segments = same_prompt(segments)
            if len(segments) > 1 and np.array_equal(segments[0].input_ids, segments[1].input_ids):
                raise RowDropped(EQUAL_CUT if outcome.truncated else EQUAL)
            outcome.examples = [Example(tuple(segments), outcome.columns)]
        except RowDropped as reason:
            outcome.dropped, outcome.notes, outcome.truncated, outcome.answers_lost = reason.reason, (), (), 0

    def _fit(self, index: int, sample: WholeSample, outcome: Outcome, media: bytes) -> Segment:
        """The segment, truncated if needed; cuts are added to the outcome."""
        limit = self._settings.max_length
        if not sample.trained.any():
            raise RowDropped("no trained answer")
        if len(sample.ids) <= limit:
            return Segment(sample.ids, sample.trained, media)
        if media and self._settings.overlong == "truncate":
            raise RowDropped(f"{TOO_LONG} {limit}; rows with images are not cut")
        if self._settings.overlong not in ("drop", "error"):
            keep, done = cut(self._settings.overlong, sample, limit)
            if not all(keep[start:end].all() for start, end in sample.whole):
                raise RowDropped(SPLIT)
            outcome.truncated = tuple(dict.fromkeys((*outcome.truncated, *done)))
            outcome.answers_lost += sum(turn.trained and not keep[turn.start] for turn in sample.turns)
            return Segment(sample.ids[keep], sample.trained[keep], media)
        if self._settings.overlong == "drop":
            raise RowDropped(f"{TOO_LONG} {limit}")
        what = f"{len(sample.ids)} tokens exceed data.max_length ({limit})"
        remedy = "raise data.max_length, or set data.overlong to truncate or drop"
        raise BadRow(index, what, remedy, "data.sample_too_long")

    def _fit_answers(
        self, samples: Sequence[WholeSample], outcome: Outcome, media: Sequence[bytes]
    ) -> tuple[Segment, ...]:
        """The segments of answers to one prompt, which has the same length in all of them."""
        keep = [np.ones(len(one.ids), dtype=bool) for one in samples]
        if any(len(one.ids) > self._settings.max_length for one in samples):
            keep, outcome.truncated = answers_in_proportion(samples, self._settings.max_length)
        found = list(zip(samples, keep, media, strict=True))
        if not all(kept[start:end].all() for sample, kept, _ in found for start, end in sample.whole):
            raise RowDropped(SPLIT)
        return tuple(Segment(sample.ids[kept], sample.trained[kept], held) for sample, kept, held in found)

    def _cut_document(self, ids: np.ndarray, outcome: Outcome) -> None:
        first, last = self._ends_of_documents
        whole = np.concatenate((first, ids, last))
        limit = self._settings.max_length
        pieces = [whole[start : start + limit] for start in range(0, len(whole), limit)]
        if len(pieces) > 1 and len(pieces[-1]) == 1:  # a single token predicts nothing
            pieces.pop()
        outcome.examples = [Example((Segment(piece, np.ones(len(piece), dtype=bool)),)) for piece in pieces]
        if len(pieces) > 1:
            outcome.notes = (*outcome.notes, PIECES)

    def _mask(self, rendering: Rendering, tokens: Encoded, outcome: Outcome) -> WholeSample:
        settings = self._settings
        trained = np.full(len(tokens.ids), settings.train_on == "all")
        turns = [self._token_turn(turn, tokens, outcome) for turn in rendering.turns]
        for turn in turns:
            if turn.trained and rendering.labels is None:
                trained[turn.start : turn.full_end if settings.train_line_break else turn.end] = True
            elif settings.train_on == "all":
                trained[turn.start : turn.end] = False
        for places, value in ((rendering.labels or (), True), (rendering.untrained, False)):
            for first, last in places:
                trained[tokens.ending_after(first) : tokens.starting_at(last)] = value
        contents = tuple[tuple[int, int], ...]()
        if len(tokens.ids) > settings.max_length and not rendering.split:
            contents = self._contents(rendering, tokens)
        places = rendering.untrained if rendering.media else ()
        whole = tuple((tokens.ending_after(first), tokens.starting_at(last)) for first, last in places)
        return WholeSample(tokens.ids, tokens.offsets, trained, tuple(turns), contents, whole)

    def _token_turn(self, turn: Turn, tokens: Encoded, outcome: Outcome) -> TokenTurn:
        """A turn in tokens; a first token that begins before it is noted."""
        start, end = tokens.ending_after(turn.start), tokens.starting_at(turn.end)
        full_end = end if turn.full_end == turn.end else tokens.starting_at(turn.full_end)
        if start < len(tokens.ids) and tokens.offsets[start][0] < turn.start and MERGED not in outcome.notes:
            outcome.notes = (*outcome.notes, MERGED)
        return TokenTurn(start, end, full_end, turn.complete, turn.trained)

    def _contents(self, rendering: Rendering, tokens: Encoded) -> tuple[tuple[int, int], ...]:
        """Token ranges of user and tool messages that the template renders unchanged."""
        assert self._template is not None
        found = []
        places = text_ranges(self._template, rendering.messages, rendering.tools, rendering.text)
        for index, (start, end) in places.items():
            first, last = tokens.starting_at(start), tokens.ending_after(end)
            if last > first and rendering.messages[index]["role"] != "system":
                found.append((first, last))
        return tuple(found)

    def _compare(self, rendering: Rendering, tokens: Encoded) -> None:
        """Check that our ids equal the tokenizer's own if no text contains a control token."""
        if NEUTRALISED in rendering.notes:
            return
        texts = [self._control.readable(piece) for piece in rendering.pieces]
        ids = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        expected = [one for piece in ids for one in piece]  # type: ignore[union-attr]
        before, after = map(len, self._around) if rendering.split else (0, 0)
        if expected != tokens.ids.tolist()[before : len(tokens.ids) - after]:
            raise DataError(
                f"the ids of tokenizer {type(self._tokenizer).__name__} differ from those of its tokenizer.json",
                where="data",
                remedy="report this tokenizer: training on different ids than inference uses would be wrong",
                code="model.tokenizer_inconsistent",
            )


def _document_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids before and after a document: BOS if the tokenizer adds it, and EOS."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token", code="model.tokenizer_without_eos")
    ids = tokenizer("a")["input_ids"]
    starts = tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id  # type: ignore[index]
    return ([tokenizer.bos_token_id] if starts else []), [tokenizer.eos_token_id]  # type: ignore[list-item]
