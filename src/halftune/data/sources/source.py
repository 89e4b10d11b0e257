"""Opens a data source: a file, a folder, a hub id or a builtin set. Rows know their file and line."""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, islice
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import numpy as np

from halftune.config.rules.files import is_hidden
from halftune.config.sections.data import BUILTIN_DATA, SourceSection
from halftune.core.errors import DataError
from halftune.core.files import open_input
from halftune.core.table import did_you_mean
from halftune.data.readers.files import READERS, ending, read_file
from halftune.data.readers.rows import FileRows, reading

BUILTIN = "builtin:"
# Usual names of splits that must not be trained on.
HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
_MEDIA = ("image", "audio", "video")
SAVED_BESIDE = {"dataset_info.json", "dataset_dict.json", "state.json"}  # metadata of datasets' ``save_to_disk``
TEXTS = (".md", ".rst", ".py", ".txt")  # may lie beside data
MOST = 20_000  # largest number of files and folders in a source folder
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True)
class Rows:
    """All rows of a source, in order.

    Attributes:
        name: the source as in the config.
        parts: the rows of each file.
    """

    name: str
    parts: Sequence[FileRows]
    starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        total = 0
        for part in self.parts:
            self.starts.append(total)
            total += len(part.rows)

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    def all(self) -> list[dict[str, Any]]:
        """All rows as dicts, in memory."""
        return list(self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return chain.from_iterable(part.rows for part in self.parts)

    def note(self, index: int) -> str:
        """The note on how reading changed a row, or ""."""
        part_index = bisect_right(self.starts, index) - 1
        return self.parts[part_index].notes.get(index - self.starts[part_index], "")

    def place(self, index: int) -> str:
        """A row's place in reports: ``17``, or ``a/b.jsonl:17`` in a folder."""
        part, number = self.origin(index)
        if len(self.parts) == 1:
            return str(number)
        return f"{self.parts[part].path.relative_to(self.name).as_posix()}:{number}"

    def where(self, index: int) -> str:
        """A row's place in errors: ``data.jsonl line 17``."""
        part, number = self.origin(index)
        return f"{self.parts[part].path} {self.parts[part].unit} {number}"

    def origin(self, index: int) -> tuple[int, int]:
        """A row's part, and its number there."""
        part = bisect_right(self.starts, index) - 1
        return part, self.parts[part].numbers[index - self.starts[part]]


@dataclass(frozen=True)
class TakenRows(Collection[dict[str, Any]]):
    """Some rows of a source, in order.

    Attributes:
        rows: all rows.
        chosen: int64, ascending, the indices of the rows that are taken.
    """

    rows: Rows
    chosen: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if len(self.chosen) == len(self.rows):
            return iter(self.rows)
        taken = np.zeros(len(self.rows), dtype=bool)
        taken[self.chosen] = True
        return compress(self.rows, taken)

    def __contains__(self, row: object) -> bool:
        return any(row == one for one in self)


@dataclass(frozen=True)
class Source:
    """An existing source, not read yet.

    Attributes:
        section: the source's config.
        fingerprint: sha256 of the content.
        read: reads the rows. Raises DataError.
        check: raises DataError if the content has changed since it was hashed: it would be kept under that hash.
        skipped: as ``skipped_of``.
    """

    section: SourceSection
    fingerprint: str
    read: Callable[[], Rows]
    check: Callable[[], None] = lambda: None
    skipped: tuple[str, ...] = ()


def open_source(section: SourceSection) -> Source:
    """Find a source and hash its content.

    Raises:
        DataError: no such file, folder, builtin set or hub id.
    """
    name = section.path
    if name.startswith(BUILTIN):
        return _builtin(section, name.removeprefix(BUILTIN))
    path = Path(name)
    if path.exists():
        return replace(_of_files(section, files_of(path)), skipped=tuple(skipped_of(name)))
    if not is_hub_id(name):
        raise missing(path)
    from halftune.data.sources.hub import hub_fingerprint, hub_rows

    return Source(section, hub_fingerprint(section), lambda: Rows(name, [hub_rows(section)]))


def is_hub_id(name: str) -> bool:
    """Whether the name of a missing local file can be a hub id."""
    looks_local = ending(Path(name)) in READERS or name.startswith((".", "/", "~")) or name.count("/") > 1
    return not looks_local and HUB_ID.fullmatch(name) is not None


def files_of(path: Path) -> list[Path]:
    """The files of a source that is a file or a folder.

    Raises:
        DataError: the folder has no data file, or the file type is unknown.
    """
    if path.is_dir():
        return _folder(path)
    if ending(path) not in READERS:
        what = f"unknown file type {path.suffix!r}"
        raise DataError(what, where=str(path), remedy=f"known: {', '.join(READERS)}", code="data.unknown_file_type")
    return [path]


def empty(name: str) -> DataError:
    """The error for a source without rows."""
    return DataError("the data set is empty", where=name, remedy="add rows, or use another data set", code="data.empty")


def _of_files(section: SourceSection, paths: list[Path]) -> Source:
    def read() -> Rows:
        rows = Rows(section.path, [read_file(path) for path in paths])
        if not len(rows):
            raise empty(section.path)
        return rows

    def check() -> None:
        if changed := [path for path, seen in zip(paths, before, strict=True) if _state(path) != seen]:
            what, remedy = "changed while it was read", "run the same command again"
            raise DataError(what, where=str(changed[0]), remedy=remedy, code="data.changed_during_run")

    before = [_state(path) for path in paths]
    return Source(section, _hash(paths), read, check)


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat() if path.exists() else None
    return () if found is None else (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _builtin(section: SourceSection, name: str) -> Source:
    if name not in BUILTIN_DATA:
        what = f"no builtin data set {name!r}"
        raise DataError(what, where="data", remedy=did_you_mean(name, BUILTIN_DATA), code="core.unknown_builtin")
    from halftune.data.sources.builtin import builtin_fingerprint, builtin_rows

    return Source(section, builtin_fingerprint(name), lambda: Rows(section.path, [builtin_rows(name)]))


def _folder(folder: Path) -> list[Path]:
    """The folder's files with the first known extension that occurs, sorted by name."""
    if Path(os.path.expanduser("~")).is_relative_to(folder.absolute()):
        what = "is the home folder or a parent of it"
        raise _ambiguous(folder, what, "use a folder with data files only")
    files = _listed(folder)
    kinds = {ending(path) for path in files}
    kind = next((kind for kind in READERS if kind in kinds), None)
    if kind is None:
        remedy = f"known extensions: {', '.join(READERS)}; folders that are links are not entered: list their targets"
        raise DataError("contains no data files", where=str(folder), remedy=remedy, code="data.no_data_files")
    others = kinds & READERS.keys() - {kind, *TEXTS}
    if others and kind not in TEXTS:
        what = f"contains several file types: {', '.join(sorted({kind, *others}))}"
        raise _ambiguous(folder, what, "list the files or sub-folders")
    chosen = [path for path in files if ending(path) == kind]
    _check_splits(folder, chosen)
    return chosen


def _listed(folder: Path) -> list[Path]:
    """All files below a folder, sorted, except hidden ones and those that ``save_to_disk`` writes beside the data."""
    found = list(islice(_entries(folder), MOST + 1))
    if len(found) > MOST:
        what = f"contains more than {MOST:,} files and folders"
        raise _ambiguous(folder, what, "use a folder with data files only, or list the files")
    found = sorted(path for path in found if not is_hidden(path.name) and path.name not in SAVED_BESIDE)
    return _regular(found)


def _entries(folder: Path) -> Iterator[Path]:
    """Files and folders below a folder; hidden folders are not entered."""
    for place, folders, names in os.walk(folder):
        yield from (Path(place, name) for name in (*folders, *names))
        folders[:] = [name for name in folders if not is_hidden(name)]


def skipped_of(name: str) -> list[str]:
    """What ``files_of`` leaves out of the folder of a source: files except media and hidden ones, and some folders.

    Folders that are hidden or linked are not entered.
    """
    folder = Path(name)
    if name.startswith(BUILTIN) or not folder.is_dir():
        return []
    taken = {*files_of(folder)}
    found = (path for path in _entries(folder) if path not in taken and _is_skipped(path))
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _is_skipped(path: Path) -> bool:
    if path.is_dir():
        return is_hidden(path.name) or path.is_symlink()
    kind = (guess_type(path.name)[0] or "").split("/")[0]
    return ending(path) in READERS or not (is_hidden(path.name) or kind in _MEDIA)


def _regular(found: list[Path]) -> list[Path]:
    """The files of a list of files and folders; refuses broken links, pipes and devices."""
    if broken := [path for path in found if not path.exists()]:
        what = "broken symbolic link"
        raise DataError(what, where=str(broken[0]), remedy="fix or remove the link", code="core.broken_link")
    found = [path for path in found if not path.is_dir()]
    if special := [path for path in found if not path.is_file()]:
        what = "is a pipe or a device; data is read more than once"
        remedy = "save it as a file, or remove it"
        raise DataError(what, where=str(special[0]), remedy=remedy, code="data.not_a_regular_file")
    return found


def _ambiguous(folder: Path, what: str, remedy: str) -> DataError:
    return DataError(what, where=str(folder), remedy=remedy, code="data.ambiguous_folder")


def _check_splits(folder: Path, files: list[Path]) -> None:
    """Refuse a folder with train and test files: the test set would be trained."""
    first: dict[str, Path] = {}
    for path in files:
        for part in path.relative_to(folder).parts:
            first.setdefault(re.split(r"[-_.]", part.lower())[0], path.relative_to(folder))
    held = next((first[word] for word in HELD_OUT if word in first), None)
    if held is not None and "train" in first:
        what = f"contains both {first['train']} and {held}: both would be trained"
        raise _ambiguous(folder, what, "put one under data.train and the other under data.eval")


def missing(path: Path) -> DataError:
    """The error for a source that does not exist."""
    near = sorted(other.name for other in path.parent.iterdir()) if path.parent.is_dir() else []
    remedy = did_you_mean(path.name, near) if near and len(near) < 50 else "check the path"
    return DataError("no such file or folder", where=str(path), remedy=remedy, code="data.not_found")


def _hash(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with reading(path), open_input(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
