"""Renders samples with trained tokens and control tokens highlighted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from halftune.config.sections.data import SourceSection
from halftune.data.order.split import TokenizedSplit
from halftune.data.report import SourceReport
from halftune.data.sources.source import open_source
from halftune.data.store import Example, Segment

TRAINED, CONTROL = "green", "reverse"
LONGEST_ROW = 2000  # characters of a raw row in the preview
OPEN, CLOSE = "⟦", "⟧"  # enclose trained tokens, for output without colour


@dataclass(frozen=True)
class Piece:
    """Adjacent tokens of one kind, as text.

    Attributes:
        text: decoded text.
        trained: whether the tokens have labels.
        control: whether this is one control token.
        count: how often the control token stands there in succession.
    """

    text: str
    trained: bool
    control: bool
    count: int = 1


def pick(
    samples: TokenizedSplit, tokenizer: PreTrainedTokenizerBase, count: int, *, seed: int | None = None, text: str = ""
) -> list[int]:
    """Choose samples to show; returns their indices.

    Args:
        samples: the split.
        tokenizer: decodes the samples.
        count: maximum number of samples.
        seed: of the random order; None keeps the order of the split.
        text: text that each sample must contain, case-insensitive; empty for all.
    """
    order = range(len(samples)) if seed is None else np.random.default_rng(seed).permutation(len(samples)).tolist()

    def holds(number: int) -> bool:
        segments = samples.example(number).segments
        return any(text.casefold() in str(tokenizer.decode(one.input_ids)).casefold() for one in segments)

    found = (number for number in order if not text or holds(number))
    return list(islice(found, max(count, 0)))


def listed_rows(section: SourceSection, report: SourceReport) -> dict[str, str]:
    """Rows that a report lists as dropped, truncated or noted: place → the row as JSON, cut to ``LONGEST_ROW``."""
    wanted = {
        place
        for kind in (report.dropped, report.truncated, report.notes)
        for one in kind.values()
        for place in one.rows
    }
    if not wanted:
        return {}
    rows = open_source(section).read()
    found = dict[str, str]()
    for index, row in enumerate(rows):
        if (place := rows.place(index)) in wanted:
            found[place] = json.dumps(row, ensure_ascii=False, default=str)[:LONGEST_ROW]
            if len(found) == len(wanted):
                break
    return found


def pieces(example: Example, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """An example as pieces of text, with an empty line between segments."""
    for number, segment in enumerate(example.segments):
        if number:
            yield Piece("\n\n", False, False)
        yield from _of_segment(segment, tokenizer)


def _of_segment(segment: Segment, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for ids, trained in _runs(segment):
        for part, count in _parts(ids, special):
            yield Piece(str(tokenizer.decode(part, skip_special_tokens=False)), trained, count > 0, max(count, 1))


def preview(example: Example, tokenizer: PreTrainedTokenizerBase) -> Text:
    """An example as rich text: trained parts are green and in ⟦ ⟧, control tokens are in reverse video."""
    text, before = Text(), False
    for piece in pieces(example, tokenizer):
        if piece.trained != before:
            text.append(OPEN if piece.trained else CLOSE, style=f"bold {TRAINED}")
        before = piece.trained
        styles = [CONTROL] * piece.control + [TRAINED] * piece.trained
        text.append(piece.text, style=" ".join(styles))
        if piece.count > 1:
            text.append(f" × {piece.count:,} ", style=" ".join(styles[1:]))
    if before:
        text.append(CLOSE, style=f"bold {TRAINED}")
    return text


def counts(example: Example) -> tuple[int, int]:
    """Number of tokens and of trained tokens of an example."""
    segments = example.segments
    return sum(len(one.input_ids) for one in segments), sum(int(one.loss_mask.sum()) for one in segments)


def as_data(example: Example, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """An example as JSON data: token counts and the pieces of each segment."""
    tokens, trained = counts(example)
    segments = [[asdict(piece) for piece in _of_segment(one, tokenizer)] for one in example.segments]
    return {"tokens": tokens, "trained": trained, "segments": segments}


def _runs(segment: Segment) -> Iterator[tuple[list[int], bool]]:
    """Runs of adjacent tokens that are all trained or all untrained."""
    run: list[int] = []
    before: bool | None = None
    for token, trained in zip(segment.input_ids.tolist(), segment.loss_mask.tolist(), strict=True):
        if run and trained != before:
            yield run, bool(before)
            run = []
        run.append(token)
        before = trained
    if run:
        yield run, bool(before)


def _parts(ids: list[int], special: set[int]) -> Iterator[tuple[list[int], int]]:
    """Control tokens one by one, with the number of times that each stands in succession.

    Other tokens are grouped, since one character may take several, with 0.
    """
    for is_special, group in groupby(ids, special.__contains__):
        if not is_special:
            yield list(group), 0
            continue
        for token, same in groupby(group):
            yield [token], len(list(same))
