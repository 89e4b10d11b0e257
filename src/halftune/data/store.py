"""Tokenised samples as a few flat arrays, in memory or mapped from disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halftune.data.sample import NO_LABEL, Sample

_ARRAYS = ("ids", "labelled", "offsets", "trained", "origins")
_REST = "store.json"


@dataclass(frozen=True)
class TokenStore:
    """N samples of T tokens together.

    Attributes:
        ids: int32[T].
        labelled: bool[T], whether a token carries a label; false for the first token of a sample.
        offsets: int64[N + 1], where samples begin.
        trained: int32[N], labelled tokens of each sample.
        origins: int32[N, 2], where each sample comes from: its file's place in ``files``, and the number in it.
        files: (path, what its numbers count), as ``files.FileRows`` has them.
        highest: the highest token id in ``ids``.
        mapped: of each file under the arrays, where there are: path, number on its disk, and its size in bytes.
    """

    ids: np.ndarray
    labelled: np.ndarray
    offsets: np.ndarray
    trained: np.ndarray
    origins: np.ndarray
    files: tuple[tuple[str, str], ...]
    highest: int
    mapped: tuple[tuple[Path, int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.trained)

    @property
    def lengths(self) -> np.ndarray:
        """int32[N], tokens of each sample."""
        return np.diff(self.offsets).astype(np.int32)

    def origin(self, index: int) -> tuple[str, str, int]:
        """Where a sample comes from: ``("data.jsonl", "line", 17)``."""
        file, number = self.origins[index].tolist()
        return (*self.files[file], number)

    def sample(self, index: int) -> Sample:
        """The sample at a position.

        Raises:
            ValueError: the arrays are not what was written: a token id that was not there, or an impossible place; or
                a file under them has been cut short.
        """
        self._check_length()
        start, end = self.offsets[index], self.offsets[index + 1]
        if not 0 <= start < end <= len(self.ids):
            raise ValueError(f"it should be tokens {start} to {end} of {len(self.ids)}")
        ids = np.array(self.ids[start:end])
        if ids.min() < 0 or ids.max() > self.highest:
            raise ValueError(f"it holds token ids of {ids.min()} to {ids.max()}, and there were 0 to {self.highest}")
        return Sample(ids, np.where(self.labelled[start:end], ids, np.int32(NO_LABEL)))

    def _check_length(self) -> None:
        """Reading what is mapped beyond the end of a file kills the process with SIGBUS, without a word."""
        for path, inode, size in self.mapped:
            with suppress(FileNotFoundError):  # what is deleted, or replaced by another file, is still there for us
                now = path.stat()
                if now.st_ino == inode and now.st_size < size:
                    raise ValueError(f"{path.name} has {now.st_size:,} bytes and had {size:,}")


def build_store(
    samples: Sequence[tuple[np.ndarray, np.ndarray]],
    origins: Sequence[tuple[int, int]],
    files: Sequence[tuple[str, str]],
) -> TokenStore:
    """Lays (ids int32[T], labelled bool[T]) samples one behind the other.

    Args:
        samples: N of them.
        origins: of each its file's place in ``files`` and the number in it.
        files: (path, what its numbers count).
    """
    offsets = np.zeros(len(samples) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids, _ in samples], out=offsets[1:])
    ids = np.concatenate([ids for ids, _ in samples]) if samples else np.zeros(0, dtype=np.int32)
    labelled = np.concatenate([marks for _, marks in samples]) if samples else np.zeros(0, dtype=bool)
    labelled[offsets[:-1]] = False
    before = np.concatenate([[0], np.cumsum(labelled, dtype=np.int64)])
    trained = before[offsets[1:]] - before[offsets[:-1]]
    places = np.array(origins, dtype=np.int32).reshape(-1, 2)
    highest = int(ids.max(initial=0))
    return TokenStore(ids.astype(np.int32), labelled, offsets, trained.astype(np.int32), places, tuple(files), highest)


def save_store(store: TokenStore, folder: Path) -> None:
    """Writes the arrays, one .npy file each, and the rest as JSON."""
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", vars(store)[name], allow_pickle=False)
    rest = {"files": store.files, "highest": store.highest}
    (folder / _REST).write_text(json.dumps(rest), encoding="utf-8")


def load_store(folder: Path) -> TokenStore:
    """Maps the arrays of a folder.

    Raises:
        OSError, ValueError, EOFError: a file is missing, cut short or of another length than it must be.
    """
    ids, labelled, offsets, trained, origins = (
        np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS
    )
    if not len(ids) == len(labelled) == offsets[-1] or not len(trained) == len(origins) == len(offsets) - 1:
        raise ValueError("arrays of different lengths")
    rest = json.loads((folder / _REST).read_text(encoding="utf-8"))
    files = tuple((path, unit) for path, unit in rest["files"])
    paths = [folder / f"{name}.npy" for name in _ARRAYS]
    mapped = tuple((path, path.stat().st_ino, path.stat().st_size) for path in paths)
    return TokenStore(ids, labelled, offsets, trained, origins, files, rest["highest"], mapped)
