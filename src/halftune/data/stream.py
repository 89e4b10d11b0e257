"""Rows that are read and tokenised while training, buffer by buffer, from a position that a checkpoint keeps.

``datasets`` reads the rows, gives each process its share of them, and knows the position in a source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from transformers import PreTrainedTokenizerBase

from halftune.config.run import RunConfig
from halftune.config.sections.data import SourceSection
from halftune.core.errors import DataError
from halftune.core.files import open_input
from halftune.core.log import get_logger
from halftune.data.encode.settings import Settings
from halftune.data.encode.workers import CHUNK, make_row_tokenizer
from halftune.data.formats.conversation import BadRow
from halftune.data.formats.detect import bad_row, detect_for
from halftune.data.order.split import TokenizedSplit
from halftune.data.readers.files import ending, read_file
from halftune.data.readers.json_lines import line_rows
from halftune.data.report import SourceReport, histogram, nothing_left
from halftune.data.sources.source import BUILTIN, empty, files_of, is_hub_id, missing, skipped_of
from halftune.data.store import Example, TokenStore, build_store

log = get_logger(__name__)

FIRST = 1000  # rows of a source that show its format and fill the data report
_SAMPLE = 1 << 20  # bytes at the start and the end of a file that identify it
_CHOOSE = 4  # random stream, beside those of ``split``


class Item(NamedTuple):
    """A row and where it is from; ``unit`` as in ``files.FileRows``."""

    file: str
    unit: str
    number: int
    row: dict[str, Any]

    def place(self, index: int) -> str:
        """The place in reports, as ``Rows.place``; of the one row, whatever the index."""
        return f"{Path(self.file).name}:{self.number}"


class Buffer(NamedTuple):
    """Rows that are shuffled and packed together.

    Attributes:
        number: 0 for the first.
        place: the position before it, JSON-able.
        split: its samples.
    """

    number: int
    place: dict[str, Any]
    split: TokenizedSplit


class TokenStream:
    """All training sources of a run, read by several processes.

    Args:
        config: reads ``data``, the method and the seed.
        tokenizer, settings: as ``RowTokenizer``.

    Attributes:
        first: stores, reports and fingerprints of the first rows of each source.

    Raises:
        DataError: as ``prepare``; later rows raise in the buffer that they belong to.
    """

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self._seed, self._size = config.training.seed, config.data.streaming.buffer
        self._sources = [_Source(section, config, tokenizer, settings) for section in config.data.train]
        weights = np.array([section.weight for section in config.data.train])
        self._shares = weights / weights.sum()
        found = [source.first for source in self._sources]
        self.first = found, [one.report for one in self._sources], [one.fingerprint for one in self._sources]

    def fingerprint(self, processes: int) -> str:
        """sha256 of what the order of the rows depends on."""
        parts = [self._seed, self._size, processes, self._shares.tolist(), self.first[2]]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def buffers(self, rank: int, processes: int, place: dict[str, Any] | None) -> Iterator[Buffer]:
        """The buffers of one process without end; no other process gets their rows.

        Args:
            rank: this process, of ``processes``.
            place: of the first buffer; None for the beginning.
        """
        number, places = (place["buffer"], place["sources"]) if place else (0, [None] * len(self._sources))
        readers = [_Reader(*pair, rank, processes) for pair in zip(self._sources, places, strict=True)]
        while True:
            before = {"buffer": number, "sources": [reader.place() for reader in readers]}
            counts = np.random.default_rng([self._seed, _CHOOSE, rank, number]).multinomial(self._size, self._shares)
            stores = [
                source.tokens(reader.take(int(count)))
                for source, reader, count in zip(self._sources, readers, counts, strict=True)
            ]
            total = sum(map(len, stores))
            if not total:
                raise nothing_left(self._sources[0].name, self._sources[0].report.dropped)
            yield Buffer(number, before, TokenizedSplit(stores, np.arange(total)))
            number += 1


class _Source:
    """One source: its rows, and their tokens."""

    def __init__(
        self, section: SourceSection, config: RunConfig, tokenizer: PreTrainedTokenizerBase, settings: Settings
    ) -> None:
        self.name, self._section = section.path, section
        self.data, self.fingerprint = _opened(section)
        items = list(islice(self.items(self.data(), 0), FIRST))
        if not items:
            raise empty(self.name)
        self._method, self._reading = config.method, detect_for(config.method, [item.row for item in items], section)
        reading = self._reading
        settings = replace(settings, drop_system=section.drop_system)
        self._tokenizer = make_row_tokenizer(tokenizer, reading, settings)
        self.report = SourceReport.started(self.name, reading, rows=len(items), taken=len(items))
        self.report.skipped = skipped_of(section.path)
        self.first = self.tokens(items)
        report, store = deepcopy(self.report), self.first
        if not report.kept:
            raise nothing_left(self.name, report.dropped)
        report.samples, report.tokens, report.trained_tokens = len(store), len(store.ids), int(store.trained.sum())
        report.lengths = histogram(store.lengths)
        self.report, self._all = report, replace(report, rows=0, taken=0, kept=0)

    def items(self, data: IterableDataset, before: int) -> Iterator[Item]:
        """Rows of ``data`` after ``before`` others."""
        for number, found in enumerate(data, start=before + 1):
            yield Item(**found) if self._is_local else Item(self.name, "row", number, found)

    @property
    def _is_local(self) -> bool:
        return not is_remote(self._section)

    def tokens(self, items: Sequence[Item]) -> TokenStore:
        """Tokens of rows; counts what becomes of them.

        Raises:
            DataError: a row is malformed, or the tokenizer cannot represent its source's text.
        """
        examples, origins, files = list[Example](), list[tuple[int, int]](), dict[tuple[str, str], int]()
        known = self._reasons()
        for start in range(0, len(items), CHUNK):
            chunk = items[start : start + CHUNK]
            try:
                outcomes = self._tokenizer.tokenize([item.row for item in chunk])
            except BadRow as error:
                places = ["{} {} {}".format(*item[:3]) for item in chunk]
                rows = [item.row for item in chunk]
                raise bad_row(error, rows, places.__getitem__, self._reading, self._section, self._method) from error
            for item, outcome in zip(chunk, outcomes, strict=True):
                examples += outcome.examples
                file = files.setdefault((item.file, item.unit), len(files))
                origins += [(file, item.number)] * len(outcome.examples)
                self.report.count(outcome, item, 0)
                for reason in self._reasons() - known:
                    known.add(reason)
                    log.warning("%s: first in %s: %s", self.name, item.place(0), reason)
        self.report.check_lost()
        return build_store(examples, origins, list(files))

    def _reasons(self) -> set[str]:
        return {*self.report.dropped, *self.report.truncated, *self.report.notes}


def is_remote(section: SourceSection) -> bool:
    """Whether a source is a hub id."""
    name = section.path
    return not name.startswith(BUILTIN) and not Path(name).exists() and is_hub_id(name)


class _Reader:
    """Reads one process's share of a source, again and again."""

    def __init__(self, source: _Source, place: dict[str, Any] | None, rank: int, processes: int) -> None:
        self._source, self._share = source, (rank, processes)
        self._pass, self._count = (place["pass"], place["rows"]) if place else (0, 0)
        self._begin(place["at"] if place else None)

    def _begin(self, at: dict[str, Any] | None) -> None:
        self._at = at  # until the first row: ``state_dict`` does not know it before
        data = self._source.data()
        self._data = split_dataset_by_node(data, *self._share) if self._share[1] > 1 else data
        if at is not None:
            self._data.load_state_dict(deepcopy(at))
        self._items = self._source.items(self._data, self._count)

    def place(self) -> dict[str, Any]:
        """The position, JSON-able."""
        return {"pass": self._pass, "rows": self._count, "at": self._at}

    def take(self, count: int) -> list[Item]:
        """The next rows; after the last one, the source begins again.

        Raises:
            DataError: this process's share is empty.
        """
        found = list[Item]()
        while True:
            part = list(islice(self._items, count - len(found)))
            found, self._count = found + part, self._count + len(part)
            if part:
                self._at = deepcopy(self._data.state_dict())
            if len(found) == count:
                return found
            if not self._count:
                what = f"fewer rows than processes ({self._share[1]})"
                raise DataError(what, where=self._source.name, remedy="use fewer processes", code="data.empty")
            self._pass, self._count = self._pass + 1, 0
            log.info("%s: all rows of process %d were read: pass %d", self._source.name, self._share[0], self._pass + 1)
            self._begin(None)


def _opened(section: SourceSection) -> tuple[Any, str]:
    """A function that opens a source from its first row, and the identity of its content."""
    name = section.path
    if is_remote(section):
        from halftune.data.sources.hub import hub_stream

        return hub_stream(section)
    if name.startswith(BUILTIN):
        from halftune.data.sources.source import open_source

        return lambda: _of_files([name]), open_source(section).fingerprint
    if not Path(name).exists():
        raise missing(Path(name))
    paths = files_of(Path(name))
    return lambda: _of_files([str(path) for path in paths]), _identity(paths)


def _of_files(names: list[str]) -> IterableDataset:
    return IterableDataset.from_generator(_rows, gen_kwargs={"names": names})  # type: ignore[return-value]


def _rows(names: list[str]) -> Iterator[dict[str, Any]]:
    """Fields of :class:`Item`; each file is a shard."""
    for name in names:
        path = Path(name)
        if name.startswith(BUILTIN):
            from halftune.data.sources.builtin import builtin_rows

            found = builtin_rows(name.removeprefix(BUILTIN))
            unit, rows = found.unit, zip(found.numbers, found.rows, strict=True)
        elif ending(path) in (".jsonl", ".ndjson"):
            unit, rows = "line", line_rows(path)
        else:
            found = read_file(path)
            unit, rows = found.unit, zip(found.numbers, found.rows, strict=True)
        for number, row in rows:
            yield {"file": name, "unit": unit, "number": number, "row": row}


def _identity(paths: Sequence[Path]) -> str:
    """sha256 of the names, the sizes, and the first and last mebibyte of files: reading all may take hours."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open_input(path) as file:
            digest.update(file.read(_SAMPLE))
            file.seek(max(size - _SAMPLE, 0))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
