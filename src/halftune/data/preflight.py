"""Reads a run's data files before anything heavy is imported: what is wrong with them is said at once."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from halftune.config.facts.folder import has_chat_template
from halftune.config.run import RunConfig
from halftune.config.sections.data import SourceSection
from halftune.config.sections.model import ModelSection
from halftune.core.errors import DataError
from halftune.data.conversation import RowDropped, RowError
from halftune.data.detect import detect_for
from halftune.data.files import FileRows, ending, first_lines, read_file
from halftune.data.missing import with_nulls
from halftune.data.mixture import choose_rows, count_held_out
from halftune.data.report import Count, nothing_left
from halftune.data.sources import BUILTIN, Rows, empty, files_of

ENOUGH = 8 << 20  # bytes of each source: read in a fraction of a second


def look_over(config: RunConfig) -> None:
    """Reads every local source as far as ``ENOUGH`` goes and makes conversations of its rows, without a tokenizer.

    What lies further on, and what only a tokenizer can tell, is found when the data is prepared.

    Raises:
        DataError: a row is malformed or has no answer, no format fits, nothing is left to train on, conversations meet
            a local tokenizer without a chat template, or ``data.eval_split`` holds everything out.
    """
    kept: list[list[bytes] | None] = []
    for section in (*config.data.train, *config.data.eval):
        found = _rows(section)
        kept.append(None if found is None else _check(found, section, config))
    contents = [one for one in kept if one is not None]
    # of conversations: each row is one sample at most, while documents are cut into several
    if config.data.eval_split and not config.data.eval and config.method.type == "sft" and len(contents) == len(kept):
        count_held_out(config.data.eval_split, len(set().union(*contents)), sum(map(len, contents)))


@dataclass(frozen=True)
class _Found:
    """Rows of a source; ``whole`` where these are all."""

    rows: Rows
    whole: bool


def _rows(section: SourceSection) -> _Found | None:
    """The rows, or as many as can be read quickly; None where there is nothing to read here."""
    if section.path.startswith(BUILTIN) or not os.path.exists(section.path):
        return None
    paths = files_of(Path(section.path))
    parts: list[FileRows] = []
    left = ENOUGH
    for path in paths:
        if path.is_file() and path.stat().st_size > left:
            if ending(path) not in (".jsonl", ".ndjson") or path.suffix == ".gz":
                return _Found(Rows(section.path, parts), False) if parts else None
            parts.append(first_lines(path, left))
            return _Found(Rows(section.path, parts), False)
        parts.append(read_file(path))
        left -= path.stat().st_size
    return _Found(Rows(section.path, parts), True)


def _check(found: _Found, section: SourceSection, config: RunConfig) -> list[bytes] | None:
    """A digest of each conversation; None where there may be more of them."""
    rows = found.rows
    if not len(rows):
        if found.whole:
            raise empty(section.path)
        return None
    if not found.whole and section.samples is not None:
        return None  # which rows are taken depends on how many there are
    everything = rows.all()
    chosen = choose_rows(len(rows), section.samples, seed=config.training.seed).tolist()
    reading = detect_for(config.method.type, [everything[index] for index in chosen], section)
    _check_template(reading.format.name, config.model)
    dropped: dict[str, Count] = {}
    kept: list[bytes] = []
    for index in chosen:
        try:
            read = reading.format.read(with_nulls(reading.rename(everything[index])))
            kept.append(hashlib.blake2b(repr(read).encode(errors="replace"), digest_size=16).digest())
        except RowDropped as reason:
            dropped.setdefault(reason.reason, Count()).add(rows.place(index))
        except RowError as error:
            raise DataError(error.what, where=rows.where(index), remedy=error.remedy) from error
    if found.whole and sum(count.count for count in dropped.values()) == len(chosen):
        raise nothing_left(section.path, dropped)
    return kept if found.whole else None


def _check_template(form: str, model: ModelSection) -> None:
    folder = Path(model.tokenizer or model.name_or_path)
    if form == "text" or model.chat_template is not None or not folder.is_dir():
        return
    if not has_chat_template(folder):
        raise no_chat_template(str(folder))


def no_chat_template(where: str) -> DataError:
    """The error for conversations and a tokenizer that has no chat template."""
    what = "the tokenizer has no chat template, so a conversation cannot be rendered"
    return DataError(what, where=where, remedy="set model.chat_template: chatml, or to the path of a Jinja file")
