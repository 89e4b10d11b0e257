"""The data report: what became of every row, and what training will be fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from halftune.core.errors import DataError
from halftune.data.forms import NO_SYSTEM

SHOWN = 20  # row numbers that a report lists for each reason
MERGE = "set data.merge_system: true to put it in front of the first question"
BAR = 40  # characters of a histogram's longest bar


@dataclass
class Count:
    """A number of rows, and where the first of them stand."""

    count: int = 0
    rows: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        """Counts a row."""
        self.count += 1
        if len(self.rows) < SHOWN:
            self.rows.append(place)

    def __str__(self) -> str:
        listed = ", ".join(self.rows[:8])
        return f"{self.count} ({'row' if self.count == 1 else 'rows'} {listed}{', …' if self.count > 8 else ''})"


@dataclass
class SourceReport:
    """One source.

    Attributes:
        name, format: the source, and the format of its rows.
        columns: the format's column → the file's.
        absent: optional columns that it has not; nothing stands for them.
        unused: columns that nothing reads.
        gaps: optional columns that some rows have not → number of those rows.
        rows: rows in the source; ``taken`` of them after ``samples``.
        kept: rows that give at least one sample.
        samples: samples, before weights.
        truncated_rows: rows that were made to fit.
        answers_lost: answers to train that were left out to make rows fit.
        dropped, truncated, notes: reason → rows; several may be true of one row.
        tokens, trained_tokens: of all samples.
        lengths: (upper bound in tokens, samples) of a histogram.
    """

    name: str
    format: str
    columns: dict[str, str]
    absent: list[str]
    unused: list[str]
    gaps: dict[str, int]
    rows: int
    taken: int
    kept: int = 0
    samples: int = 0
    truncated_rows: int = 0
    answers_lost: int = 0
    dropped: dict[str, Count] = field(default_factory=dict)
    truncated: dict[str, Count] = field(default_factory=dict)
    notes: dict[str, Count] = field(default_factory=dict)
    tokens: int = 0
    trained_tokens: int = 0
    lengths: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SourceReport:
        """The inverse of ``dataclasses.asdict``."""
        counted = {
            name: {reason: Count(**count) for reason, count in values[name].items()}
            for name in ("dropped", "truncated", "notes")
        }
        return cls(**{**values, **counted, "lengths": [(bound, count) for bound, count in values["lengths"]]})


@dataclass(frozen=True)
class Efficiency:
    """How much of what is fed is not padding, in the first epoch.

    Attributes:
        padded: share of real tokens in padded batches of ``batch`` rows, or of ``tokens`` tokens, grouped by length
            where that is on.
        packed: share of real tokens in packed rows of ``max_length``.
        packed_rows: number of such rows.
    """

    batch: int
    padded: float
    packed: float
    packed_rows: int
    tokens: int | None = None


@dataclass(frozen=True)
class DataReport:
    """All sources of a run.

    Attributes:
        train, eval: one report for each source.
        train_samples, eval_samples: samples of an epoch, after weights and the held-out share.
        max_length: longest sample allowed, in tokens.
        efficiency: of the training samples.
    """

    train: Sequence[SourceReport]
    eval: Sequence[SourceReport]
    train_samples: int
    eval_samples: int
    max_length: int
    efficiency: Efficiency

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        return asdict(self)

    def render(self) -> RenderableType:
        """The report for a terminal: print it with rich."""
        parts: list[RenderableType] = [self._table()]
        for source in (*self.train, *self.eval):
            parts += [Text(), *_details(source)]
        return Group(*parts, Text(), self._summary())

    def _table(self) -> Table:
        table = Table(title="data", title_justify="left", box=None, pad_edge=False, header_style="bold")
        table.add_column("source", overflow="fold")
        for name in ("format", "rows", "kept", "dropped", "truncated", "samples", "tokens", "trained"):
            table.add_column(name, justify="left" if name == "format" else "right")
        for source in (*self.train, *self.eval):
            table.add_row(
                Path(source.name).name,
                source.format,
                f"{source.taken:,}",
                f"{source.kept:,}",
                f"{source.taken - source.kept:,}",
                f"{source.truncated_rows:,}",
                f"{source.samples:,}",
                f"{source.tokens:,}",
                f"{source.trained_tokens / max(source.tokens, 1):.0%}",
            )
        return table

    def _summary(self) -> Text:
        fed = self.efficiency
        lines = [
            f"an epoch: {self.train_samples:,} samples",
            f"evaluation: {self.eval_samples:,} samples" if self.eval_samples else "no evaluation data",
            f"padded batches of {fed.batch if fed.tokens is None else f'{fed.tokens:,} tokens'}: "
            f"{fed.padded:.0%} of the fed tokens are real",
            f"packed into {fed.packed_rows:,} rows of {self.max_length:,}: {fed.packed:.0%} are real",
        ]
        return Text(" · ".join(lines))


def nothing_left(name: str, dropped: Mapping[str, Count]) -> DataError:
    """The error for a source none of whose rows can be trained on."""
    why = "; ".join(f"{reason}: {count}" for reason, count in dropped.items())
    remedy = "correct the data or data.columns"
    if NO_SYSTEM in dropped:
        remedy = MERGE
    if any("max_length" in reason for reason in dropped):
        remedy = "raise data.max_length: it is in tokens, the chat template's own included"
    return DataError(f"no row is left to train on: {why}", where=name, remedy=remedy)


def _details(source: SourceReport) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(source.name, style="bold")]
    read = ", ".join(ours if ours == theirs else f"{ours} ← {theirs}" for ours, theirs in source.columns.items())
    lines.append(Text(f"  format {source.format}: {read}"))
    if source.taken < source.rows:
        lines.append(Text(f"  {source.taken:,} of {source.rows:,} rows taken"))
    if source.absent:
        lines.append(Text(f"  columns that are not there, so empty: {', '.join(source.absent)}"))
    for column, rows in source.gaps.items():
        lines.append(Text(f"  column {column} is missing in {rows:,} rows, so empty there"))
    if source.unused:
        lines.append(Text(f"  columns not used: {', '.join(source.unused)}", style="yellow"))
    for title, style, counts in (
        ("dropped", "red", source.dropped),
        ("truncated", "yellow", source.truncated),
        ("note", "yellow", source.notes),
    ):
        lines += [Text(f"  {title}: {reason}: {count}", style=style) for reason, count in counts.items()]
    if source.answers_lost:
        lines.append(Text(f"  truncated: {source.answers_lost:,} whole answers left out", style="yellow"))
    highest = max((count for _, count in source.lengths), default=1)
    for bound, count in source.lengths:
        bar = "█" * max(round(BAR * count / max(highest, 1)), 1 if count else 0)
        lines.append(Text(f"  ≤ {bound:>6,} tokens {count:>8,} {bar}"))
    return lines


def histogram(lengths: np.ndarray, bins: int = 10) -> list[tuple[int, int]]:
    """(upper bound, samples) of about ``bins`` ranges of equal width up to the longest sample."""
    if not len(lengths):
        return []
    longest = int(lengths.max())
    width = -(-longest // bins)
    counts = np.bincount((lengths - 1) // width)
    return [(min((index + 1) * width, longest), int(count)) for index, count in enumerate(counts)]
