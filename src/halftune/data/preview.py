"""Shows samples with the trained tokens marked and every control token visible."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from halftune.config.sections.data import SourceSection
from halftune.data.report import SourceReport
from halftune.data.sample import NO_LABEL, Sample
from halftune.data.sources import open_source
from halftune.data.split import TokenizedSplit

TRAINED, CONTROL = "green", "reverse"
LONGEST_ROW = 2000  # characters of a row that is shown as it stands
OPEN, CLOSE = "⟦", "⟧"  # stand around trained tokens, so that a pipe without colour shows them too


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind, as text.

    Attributes:
        text: what they decode to.
        trained: whether they carry a label.
        control: whether it is one control token.
    """

    text: str
    trained: bool
    control: bool


def pick(
    samples: TokenizedSplit, tokenizer: PreTrainedTokenizerBase, count: int, *, seed: int | None = None, text: str = ""
) -> list[int]:
    """Numbers of samples to show.

    Args:
        samples: to pick from.
        tokenizer: reads them.
        count: at most so many.
        seed: of their order; as they stand where it is None.
        text: what each must contain, in capitals or not; empty for anything.
    """
    order = range(len(samples)) if seed is None else np.random.default_rng(seed).permutation(len(samples)).tolist()
    found = (
        number
        for number in order
        if not text or text.casefold() in str(tokenizer.decode(samples.sample(number).input_ids)).casefold()
    )
    return list(islice(found, max(count, 0)))


def listed_rows(section: SourceSection, report: SourceReport) -> dict[str, str]:
    """The rows that a report lists as dropped, shortened or odd: place → the row as JSON, or its beginning."""
    wanted = {
        place
        for kind in (report.dropped, report.truncated, report.notes)
        for one in kind.values()
        for place in one.rows
    }
    if not wanted:
        return {}
    rows = open_source(section).read()
    all_rows, found = rows.all(), dict[str, str]()
    for index in range(len(rows)):
        if (place := rows.place(index)) in wanted:
            found[place] = json.dumps(all_rows[index], ensure_ascii=False, default=str)[:LONGEST_ROW]
            if len(found) == len(wanted):
                break
    return found


def pieces(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """A sample as pieces of text."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for ids, trained in _runs(sample):
        for part, control in _parts(ids, special):
            yield Piece(str(tokenizer.decode(part, skip_special_tokens=False)), trained, control)


def preview(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Text:
    """A sample as text: what is trained is green and stands between ⟦ and ⟧, control tokens are reversed."""
    text, before = Text(), False
    for piece in pieces(sample, tokenizer):
        if piece.trained != before:
            text.append(OPEN if piece.trained else CLOSE, style=f"bold {TRAINED}")
        before = piece.trained
        styles = [CONTROL] * piece.control + [TRAINED] * piece.trained
        text.append(piece.text, style=" ".join(styles))
    if before:
        text.append(CLOSE, style=f"bold {TRAINED}")
    return text


def as_data(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A sample as JSON-able data: number of tokens, of trained ones, and its pieces."""
    trained = int((sample.labels != NO_LABEL).sum())
    shown = [asdict(piece) for piece in pieces(sample, tokenizer)]
    return {"tokens": len(sample.input_ids), "trained": trained, "pieces": shown}


def _runs(sample: Sample) -> Iterator[tuple[list[int], bool]]:
    """Neighbouring tokens that are all trained or all not."""
    run: list[int] = []
    before: bool | None = None
    for token, label in zip(sample.input_ids.tolist(), sample.labels.tolist(), strict=True):
        trained = label != NO_LABEL
        if run and trained != before:
            yield run, bool(before)
            run = []
        run.append(token)
        before = trained
    if run:
        yield run, bool(before)


def _parts(ids: list[int], special: set[int]) -> Iterator[tuple[list[int], bool]]:
    """Control tokens one by one, what stands between them together (a character may take several tokens)."""
    plain: list[int] = []
    for token in ids:
        if token in special:
            if plain:
                yield plain, False
            yield [token], True
            plain = []
        else:
            plain.append(token)
    if plain:
        yield plain, False
