"""The data report: kept, dropped and truncated rows, token counts and padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from halftune.core.errors import DataError
from halftune.data.formats.conversation import ONLY_TEXT, PLACEHOLDER, TOO_LONG
from halftune.data.order.split import Efficiency
from halftune.data.templates.features import NO_CALLS, NO_SYSTEM, WITH_TOOLS

if TYPE_CHECKING:
    from halftune.data.encode.tokenize import Outcome
    from halftune.data.formats.detect import Reading

LOST = 0.01  # share of characters without a token at which a source is refused
EXAMPLES = 20  # lost characters shown
SHOWN = 20  # row numbers listed per reason
MERGE = "set data.merge_system: true to merge it into the first user message"
LEFT_OVER = "left over, fewer than method.group_size"
_OTHER = "model.chat_template to a template that renders them"
_REMEDIES = (  # parts of the reasons that the recipe or the chat template causes
    (TOO_LONG, "raise data.max_length (in tokens, chat template included), or set data.overlong"),
    (ONLY_TEXT, "set data.images, data.audio or data.videos, and name a model that takes them"),
    (LEFT_OVER, "lower method.group_size, or add rows"),
    (NO_CALLS, f"the rows are right: {WITH_TOOLS}"),
    ("omit", f"the rows are right: set data.on_lost_text: warn, or {_OTHER}"),
    ("it is not trained", f"the rows are right: set data.on_lost_text: warn, or {_OTHER}"),
    ("chat template", f"the rows are right: set {_OTHER}"),
)
BAR = 40  # characters of the longest histogram bar


@dataclass
class Count:
    """A number of rows, and the places of the first ones."""

    count: int = 0
    rows: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        """Count a row."""
        self.count += 1
        if len(self.rows) < SHOWN:
            self.rows.append(place)

    def __str__(self) -> str:
        listed = ", ".join(self.rows[:8])
        return f"{self.count} ({'row' if self.count == 1 else 'rows'} {listed}{', …' if self.count > 8 else ''})"


class Places(Protocol):
    """Rows that know their places."""

    def place(self, index: int) -> str:
        """A row's place in reports."""
        ...


@dataclass
class SourceReport:
    """The report of one source.

    Attributes:
        name, format: the source, and the format of its rows.
        columns: the format's column → the file's column.
        absent: optional columns that the source lacks.
        unused: columns that are ignored.
        gaps: optional columns → number of rows without a value.
        skipped: files and hidden folders of the source's folder that are not read.
        rows, taken: rows in the source, and after ``samples``.
        kept: rows with at least one sample.
        samples: samples before source weights.
        truncated_rows: rows that were truncated.
        answers_lost: trained answers dropped by truncation.
        dropped, truncated, notes: reason → rows; one row may have several reasons.
        tokens, trained_tokens: of all samples.
        lengths: histogram of sample lengths, (upper bound in tokens, samples).
        characters, lost_characters: in the rendered rows, and those that the tokenizer cannot represent.
        lost: the first lost characters.
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
    characters: int = 0
    lost_characters: int = 0
    lost: str = ""
    skipped: list[str] = field(default_factory=list)

    @classmethod
    def started(cls, name: str, reading: Reading, *, rows: int, taken: int) -> SourceReport:
        """The report of a source of which no row is counted yet."""
        absent, unused = list(reading.absent), list(reading.unused)
        return cls(name, reading.format.name, reading.columns, absent, unused, reading.gaps, rows, taken)

    @property
    def lost_share(self) -> float:
        """Share of the characters that the tokenizer cannot represent."""
        return self.lost_characters / max(self.characters, 1)

    def count(self, outcome: Outcome, rows: Places, index: int) -> None:
        """Count the outcome of the row at an index."""
        self.kept += bool(outcome.examples)
        self.truncated_rows += bool(outcome.truncated)
        self.answers_lost += outcome.answers_lost
        self.characters += outcome.characters
        self.lost_characters += len(outcome.lost)
        if outcome.lost and len(self.lost) < EXAMPLES:
            self.lost = "".join(dict.fromkeys(self.lost + outcome.lost))[:EXAMPLES]
        reasons = [(self.dropped, outcome.dropped)] if outcome.dropped else []
        reasons += [(self.truncated, what) for what in outcome.truncated]
        reasons += [(self.notes, what) for what in outcome.notes]
        for counts, given in reasons:
            reason = given
            if given.startswith(PLACEHOLDER):  # rows differ in their example: the first one stays
                reason = next((one for one in counts if one.startswith(PLACEHOLDER)), given)
            counts.setdefault(reason, Count()).add(rows.place(index))

    def check_lost(self) -> None:
        """Refuse a tokenizer that cannot represent more than ``LOST`` of the characters.

        Raises:
            DataError: it cannot.
        """
        if self.lost_share > LOST:
            what = f"the tokenizer cannot represent {self.lost_share:.1%} of the characters, for example {self.lost}"
            remedy = "set model.tokenizer to one that covers this text, or add tokens: model.tokens.add"
            raise DataError(what, where=self.name, remedy=remedy, code="data.text_lost")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SourceReport:
        """The inverse of ``dataclasses.asdict``."""
        counted = {
            name: {reason: Count(**count) for reason, count in values[name].items()}
            for name in ("dropped", "truncated", "notes")
        }
        return cls(**{**values, **counted, "lengths": [(bound, count) for bound, count in values["lengths"]]})


@dataclass(frozen=True)
class DataReport:
    """The report of all sources of a run.

    Attributes:
        train, eval: one report per source.
        train_samples, eval_samples: samples per epoch, after source weights and hold-out.
        max_length: maximum sample length in tokens.
        efficiency: padding statistics of the training samples.
        streamed: the sources are read while training; this counts their first rows.
    """

    train: Sequence[SourceReport]
    eval: Sequence[SourceReport]
    train_samples: int
    eval_samples: int
    max_length: int
    efficiency: Efficiency
    streamed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return asdict(self)

    def render(self) -> RenderableType:
        """The report as a rich renderable."""
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
        stats = self.efficiency
        lines = [
            f"{self.train_samples:,} samples {'of the first rows, streamed' if self.streamed else 'per epoch'}",
            f"evaluation: {self.eval_samples:,} samples" if self.eval_samples else "no evaluation data",
            f"padded batches of {stats.batch if stats.tokens is None else f'{stats.tokens:,} tokens'}: "
            f"{stats.padded:.0%} non-padding tokens",
            f"packed into {stats.packed_rows:,} {'row' if stats.packed_rows == 1 else 'rows'} of {self.max_length:,}: "
            f"{stats.packed:.0%} non-padding tokens",
        ]
        return Text(" · ".join(lines))


def remedy_of(reason: str) -> str:
    """What keeps rows that are dropped for a reason; where the recipe or the chat template causes it, not the rows."""
    if reason == NO_SYSTEM:
        return MERGE
    return next((remedy for part, remedy in _REMEDIES if part in reason), "correct these rows to keep them")


def nothing_left(name: str, dropped: Mapping[str, Count]) -> DataError:
    """The error for a source without a row to train on."""
    why = "; ".join(f"{reason}: {count}" for reason, count in dropped.items())
    most = max(dropped, key=lambda reason: dropped[reason].count, default="")
    return DataError(f"no rows left to train on: {why}", where=name, remedy=remedy_of(most), code="data.nothing_left")


def _details(source: SourceReport) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(source.name, style="bold")]
    read = ", ".join(ours if ours == theirs else f"{ours} ← {theirs}" for ours, theirs in source.columns.items())
    lines.append(Text(f"  format {source.format}: {read}"))
    if source.taken < source.rows:
        lines.append(Text(f"  {source.taken:,} of {source.rows:,} rows taken"))
    lines += _columns(source)
    for title, style, counts in (
        ("dropped", "red", source.dropped),
        ("truncated", "yellow", source.truncated),
        ("note", "yellow", source.notes),
    ):
        lines += [Text(f"  {title}: {reason}: {count}", style=style) for reason, count in counts.items()]
    if source.lost_characters:
        lines.append(Text(f"  {source.lost_characters:,} characters have no token: {source.lost}", style="yellow"))
    if source.answers_lost:
        lines.append(Text(f"  truncated: {source.answers_lost:,} whole answers dropped", style="yellow"))
    return lines + _bars(source.lengths)


def _columns(source: SourceReport) -> Iterator[Text]:
    """What is missing of the columns, and which columns and files are not used."""
    if source.absent:
        yield Text(f"  optional columns not found: {', '.join(source.absent)}")
    for column, rows in source.gaps.items():
        yield Text(f"  column {column} is missing in {rows:,} rows")
    if source.unused:
        yield Text(f"  columns not used: {', '.join(source.unused)}", style="yellow")
    if source.skipped:
        more = len(source.skipped) - SHOWN
        yield Text(f"  not read: {', '.join(source.skipped[:SHOWN])}{f' and {more:,} more' if more > 0 else ''}")


def _bars(lengths: Sequence[tuple[int, int]]) -> list[RenderableType]:
    """A histogram of sample lengths, one line per bound."""
    highest = max((count for _, count in lengths), default=0) or 1
    return [
        Text(f"  ≤ {bound:>6,} tokens {count:>8,} {'█' * max(round(BAR * count / highest), min(count, 1))}")
        for bound, count in lengths
    ]


def histogram(lengths: np.ndarray, bins: int = 10) -> list[tuple[int, int]]:
    """A histogram of lengths: (upper bound, samples) of about ``bins`` bins of equal width."""
    if not len(lengths):
        return []
    longest = int(lengths.max())
    width = -(-longest // bins)
    counts = np.bincount((lengths - 1) // width)
    return [(min((index + 1) * width, longest), int(count)) for index, count in enumerate(counts)]
