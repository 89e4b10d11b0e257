"""Validates local data files before importing torch, so that errors appear within a second."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halftune.config.facts.folder import fitting_template, has_chat_template
from halftune.config.run import RunConfig
from halftune.config.sections.data import SourceSection
from halftune.config.sections.model import ModelSection
from halftune.data.formats.conversation import BadRow, Record, RowDropped, RowError, no_chat_template
from halftune.data.formats.detect import Reading, bad_row, detect_for
from halftune.data.formats.fields import with_nulls
from halftune.data.order.split import choose_rows, count_held_out
from halftune.data.readers.files import ending, read_file
from halftune.data.readers.json_lines import first_lines
from halftune.data.readers.rows import FileRows
from halftune.data.report import Count, nothing_left
from halftune.data.sources.source import BUILTIN, Rows, empty, files_of, is_hub_id

ENOUGH = 8 << 20  # bytes read per source


def validate_data(config: RunConfig) -> None:
    """Parse the first ``ENOUGH`` bytes of every local source, without a tokenizer.

    Errors in later rows, and errors that need the tokenizer, appear when the data is prepared.

    Raises:
        DataError: a row is malformed or has no answer, the format is unknown, no row is left, a local tokenizer has no
            chat template for conversations, ``data.eval_split`` holds everything out, a hub data set is neither
            cached nor reachable, or a file of ``logging.sample_media`` cannot be used.
    """
    if config.logging.sample_media:
        from halftune.data.media.prompts import prompt_contents  # few runs have images

        prompt_contents(config)
    kept: list[list[bytes] | None] = []
    for section in (*config.data.train, *config.data.eval):
        found = _rows(section)
        kept.append(None if found is None else _check(found, section, config))
    contents = [one for one in kept if one is not None]
    # conversations only: a row is at most one sample, while documents are cut into several
    single = config.method.type != "pretrain" and len(contents) == len(kept)
    if config.data.eval_split and not config.data.eval and single:
        count_held_out(config.data.eval_split, len(set().union(*contents)), sum(map(len, contents)))


@dataclass(frozen=True)
class _Found:
    """Rows of a source; ``whole`` if these are all rows."""

    rows: Rows
    whole: bool


def _rows(section: SourceSection) -> _Found | None:
    """The first rows of a local source; None if there is nothing local to read."""
    if section.path.startswith(BUILTIN):
        return None
    if not os.path.exists(section.path):
        if is_hub_id(section.path):
            from halftune.data.sources.hub import check_available

            check_available(section)
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
    """A digest per conversation; None if only a part of the source was read."""
    rows = found.rows
    if found.whole and not len(rows):
        raise empty(section.path)
    if not len(rows) or (not found.whole and section.samples is not None):
        return None  # the random choice of rows depends on their number
    first = section.sampling == "first"
    chosen = choose_rows(len(rows), section.samples, seed=config.training.seed, first=first).tolist()
    everything = rows.all()
    taken = [everything[index] for index in chosen]
    reading = detect_for(config.method, taken, section)
    _check_template(reading.format.name, config.model)
    try:
        kept, dropped = _read(taken, lambda at: rows.place(chosen[at]), _reader(reading, config))
    except BadRow as error:
        raise bad_row(error, taken, lambda at: rows.where(chosen[at]), reading, section, config.method) from error
    if found.whole and not kept:
        raise nothing_left(section.path, dropped)
    return kept if found.whole else None


def _reader(reading: Reading, config: RunConfig) -> Callable[[Mapping[str, Any]], Record]:
    """Reads a row as training does."""
    if not config.data.media:
        return lambda row: reading.format.read(with_nulls(reading.rename(row)))
    from halftune.data.media.rows import read_row  # few runs have images

    data = config.data
    return lambda row: read_row(reading, with_nulls(reading.rename(row)), data.media, data.on_bad_media)


def _read(
    rows: Sequence[Mapping[str, Any]], place: Callable[[int], str], reader: Callable[[Mapping[str, Any]], Record]
) -> tuple[list[bytes], dict[str, Count]]:
    """A digest of each row that can be read, and the reasons for which others are dropped, with their places."""
    kept, dropped = list[bytes](), dict[str, Count]()
    for index, row in enumerate(rows):
        try:
            read = reader(row)
            kept.append(hashlib.blake2b(repr(read).encode(errors="replace"), digest_size=16).digest())
        except RowDropped as reason:
            dropped.setdefault(reason.reason, Count()).add(place(index))
        except RowError as error:
            raise BadRow(index, error.what, error.remedy, error.code) from error
    return kept, dropped


def _check_template(form: str, model: ModelSection) -> None:
    folder = Path(model.tokenizer or model.name_or_path)
    if form in ("text", "prompted") or model.chat_template is not None or not folder.is_dir():
        return
    if not has_chat_template(folder) and fitting_template(folder) is None:
        raise no_chat_template(str(folder))
