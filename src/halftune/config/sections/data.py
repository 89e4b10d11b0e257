"""The ``data`` section: sources, lengths, what happens to samples that do not fit."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from halftune.config.section import LISTED, Flag, Int, Number, Section


class SourceSection(Section):
    """One data source. A plain string is short for `{path: string}`."""

    word: ClassVar[str | None] = "path"

    path: str
    """A file (JSON, JSONL, CSV, Parquet, text), a folder of such files, a hub data set id, or `builtin:<name>`."""

    split: str = "train"
    """Split of a hub data set."""

    format: Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text"] = "auto"
    """Row format; `auto` detects it from the columns and prints what it found."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Where the format's columns are under other names, e.g. `{prompt: question, completion: answer}`."""

    samples: Annotated[Int, Field(ge=1)] | None = None
    """Take this many rows (the first ones after a shuffle by `training.seed`); all by default."""

    weight: Annotated[Number, Field(gt=0)] = 1.0
    """How often the source is seen in an epoch: 2 shows each row twice, 0.5 half of the rows."""


class PackingSection(Section):
    """Packing with pins. `packing: true` is short for `packing: {enabled: true}`."""

    word: ClassVar[str | None] = "enabled"

    enabled: Flag | Literal["auto"] = "auto"
    """Put several samples into one row without attention across them. `auto`: where the model keeps samples apart."""

    split: Flag = False
    """Cut a sample that does not fit in the rest of a row in two, instead of leaving the rest empty."""


class DataSection(Section):
    """Training and evaluation data."""

    train: Annotated[tuple[SourceSection, ...], LISTED, Field(min_length=1)]
    """Training sources: a path, a list of paths, or a list of sections with weights and sample counts."""

    eval: Annotated[tuple[SourceSection, ...], LISTED] = ()
    """Evaluation sources, like `train`."""

    eval_split: Annotated[Number, Field(ge=0)] = 0.0
    """Without `eval`: hold out this share (below 1) or this many (1 and above) of the training samples."""

    max_length: Annotated[Int, Field(ge=8)] = 2048
    """Longest sample in tokens; with packing, the length of a row."""

    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a longer sample. Truncation never cuts a header, an end-of-turn token or a whole answer."""

    packing: PackingSection = PackingSection()
    """`true`, `false` or `auto`, or a section."""

    group_by_length: Flag = True
    """Without packing: samples of like length share a batch, which cuts padding; the order of batches stays random."""

    system: str | None = None
    """A system message for conversations that bring none. The data's own is never changed."""

    merge_system: Flag = False
    """Where the chat template has no place for a system message (Gemma 1 and 2): put it in front of the first question.
    Otherwise such rows are left out, or the system message is, as the template has it."""

    num_workers: Annotated[Int, Field(ge=1)] | Literal["auto"] = "auto"
    """Processes that tokenise; `auto` takes one per core for large sets and none for small ones."""

    cache: Flag = True
    """Keep tokenised data in the user's cache folder, keyed by content, tokenizer and settings."""
