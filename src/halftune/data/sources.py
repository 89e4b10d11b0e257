"""Opens a data source: a file, a folder of files, a hub id, or a builtin set. Rows keep the place they came from."""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from halftune.config.builtin_data import BUILTIN_DATA
from halftune.config.sections.data import SourceSection
from halftune.core.errors import DataError
from halftune.core.table import did_you_mean
from halftune.data.builtin.sets import builtin_fingerprint, builtin_rows
from halftune.data.files import READERS, FileRows, ending, read_file
from halftune.data.hub import hub_fingerprint, hub_rows

BUILTIN = "builtin:"
# Names by which the part of a data set that must not be trained is known.
HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
SAVED_BESIDE = {"dataset_info.json", "dataset_dict.json", "state.json"}
MOST = 20_000  # files and folders of a source that is a folder
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True)
class Rows:
    """All rows of a source, in order.

    Attributes:
        name: the source as the user wrote it.
        parts: one for each file.
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
        """The rows themselves."""
        return [row for part in self.parts for row in part.rows]

    def note(self, index: int) -> str:
        """What reading changed in a row, or ""."""
        part_index = bisect_right(self.starts, index) - 1
        return self.parts[part_index].notes.get(index - self.starts[part_index], "")

    def place(self, index: int) -> str:
        """Where a row stands, for people: ``17``, or ``b.jsonl:17`` in a folder."""
        part, number = self.origin(index)
        return str(number) if len(self.parts) == 1 else f"{self.parts[part].path.name}:{number}"

    def where(self, index: int) -> str:
        """Where a row stands, for an error: ``data.jsonl line 17``."""
        part, number = self.origin(index)
        return f"{self.parts[part].path} {self.parts[part].unit} {number}"

    def origin(self, index: int) -> tuple[int, int]:
        """The part that a row stands in, and its number there."""
        part = bisect_right(self.starts, index) - 1
        return part, self.parts[part].numbers[index - self.starts[part]]


@dataclass(frozen=True)
class Source:
    """A source that exists, not yet read.

    Attributes:
        section: what the user wrote.
        fingerprint: sha256 over content, the same as long as the rows are the same.
        read: reads the rows. Raises DataError.
    """

    section: SourceSection
    fingerprint: str
    read: Callable[[], Rows]


def open_source(section: SourceSection) -> Source:
    """Finds a source and fingerprints its content.

    Raises:
        DataError: no such file, folder, builtin set or hub id.
    """
    name = section.path
    if name.startswith(BUILTIN):
        return _builtin(section, name.removeprefix(BUILTIN))
    path = Path(name)
    if path.exists():
        return _of_files(section, files_of(path))
    looks_local = ending(path) in READERS or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local or not HUB_ID.fullmatch(name):
        raise _missing(path)
    return Source(section, hub_fingerprint(section), lambda: Rows(name, [hub_rows(section)]))


def files_of(path: Path) -> list[Path]:
    """The files of a source that is a file or a folder.

    Raises:
        DataError: it holds none, or is of a kind that nothing reads.
    """
    if path.is_dir():
        return _folder(path)
    if ending(path) not in READERS:
        raise DataError(f"unknown kind of file {path.suffix!r}", where=str(path), remedy=f"known: {', '.join(READERS)}")
    return [path]


def empty(name: str) -> DataError:
    """The error for a source without a row."""
    return DataError("the data set is empty", where=name, remedy="fill it, or name another one")


def _of_files(section: SourceSection, paths: list[Path]) -> Source:
    def read() -> Rows:
        rows = Rows(section.path, [read_file(path) for path in paths])
        if not len(rows):
            raise empty(section.path)
        return rows

    return Source(section, _hash(paths), read)


def _builtin(section: SourceSection, name: str) -> Source:
    if name not in BUILTIN_DATA:
        raise DataError(f"no builtin data set {name!r}", where="data", remedy=did_you_mean(name, BUILTIN_DATA))
    return Source(section, builtin_fingerprint(name), lambda: Rows(section.path, [builtin_rows(name)]))


def _folder(folder: Path) -> list[Path]:
    """Files of one kind: the first of the known endings that the folder holds decides; sorted by name.

    What ``save_to_disk`` of datasets writes beside its Arrow files is no data.
    """
    if Path(os.path.expanduser("~")).is_relative_to(folder.absolute()):
        raise DataError("is the home folder, or holds it", where=str(folder), remedy="name a folder of data files")
    everything = list(islice(folder.rglob("*"), MOST + 1))
    if len(everything) > MOST:
        what = f"holds more than {MOST:,} files and folders"
        raise DataError(what, where=str(folder), remedy="name a folder of data files only, or the files one by one")
    found = [path for path in everything if not path.name.startswith(".")]
    if broken := sorted(path for path in found if path.is_symlink() and not path.exists()):
        raise DataError("is a link to nothing", where=str(broken[0]), remedy="mend or remove the link")
    files = sorted(path for path in found if path.is_file())
    if any(path.suffix == ".arrow" for path in files):
        files = [path for path in files if path.name not in SAVED_BESIDE]
    for kind in READERS:
        if chosen := [path for path in files if ending(path) == kind]:
            others = {ending(path) for path in files} & READERS.keys() - {kind, ".md", ".rst", ".py", ".txt"}
            if others and kind not in (".md", ".rst", ".py", ".txt"):
                raise DataError(
                    f"holds files of several kinds: {', '.join(sorted({kind, *others}))}",
                    where=str(folder),
                    remedy="name the files or sub-folders one by one",
                )
            _check_splits(folder, chosen)
            return chosen
    raise DataError("holds no data file", where=str(folder), remedy=f"known endings: {', '.join(READERS)}")


def _check_splits(folder: Path, files: list[Path]) -> None:
    """A folder of train.jsonl and test.jsonl is not one source: the test set would be trained."""
    first: dict[str, Path] = {}
    for path in files:
        for part in path.relative_to(folder).parts:
            first.setdefault(re.split(r"[-_.]", part.lower())[0], path.relative_to(folder))
    held = next((first[word] for word in HELD_OUT if word in first), None)
    if held is not None and "train" in first:
        raise DataError(
            f"holds {first['train']} and {held}, which would be one source",
            where=str(folder),
            remedy="name the files or sub-folders, the one under data.train and the other under data.eval",
        )


def _missing(path: Path) -> DataError:
    near = sorted(other.name for other in path.parent.iterdir()) if path.parent.is_dir() else []
    remedy = did_you_mean(path.name, near) if near and len(near) < 50 else "check the path"
    return DataError("no such file or folder", where=str(path), remedy=remedy)


def _hash(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
