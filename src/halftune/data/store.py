"""Tokenised samples as a few flat arrays, in memory or mapped from disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halftune.data.sample import NO_LABEL, Sample

_ARRAYS = ("ids", "labelled", "offsets", "trained")


@dataclass(frozen=True)
class TokenStore:
    """N samples of T tokens together.

    Attributes:
        ids: int32[T].
        labelled: bool[T], whether a token carries a label; false for the first token of a sample.
        offsets: int64[N + 1], where samples begin.
        trained: int32[N], labelled tokens of each sample.
    """

    ids: np.ndarray
    labelled: np.ndarray
    offsets: np.ndarray
    trained: np.ndarray

    def __len__(self) -> int:
        return len(self.trained)

    @property
    def lengths(self) -> np.ndarray:
        """int32[N], tokens of each sample."""
        return np.diff(self.offsets).astype(np.int32)

    def sample(self, index: int) -> Sample:
        """The sample at a position."""
        start, end = self.offsets[index], self.offsets[index + 1]
        ids = np.array(self.ids[start:end])
        return Sample(ids, np.where(self.labelled[start:end], ids, np.int32(NO_LABEL)))


def build_store(samples: Sequence[tuple[np.ndarray, np.ndarray]]) -> TokenStore:
    """Lays (ids int32[T], labelled bool[T]) samples one behind the other."""
    offsets = np.zeros(len(samples) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids, _ in samples], out=offsets[1:])
    ids = np.concatenate([ids for ids, _ in samples]) if samples else np.zeros(0, dtype=np.int32)
    labelled = np.concatenate([marks for _, marks in samples]) if samples else np.zeros(0, dtype=bool)
    labelled[offsets[:-1]] = False
    before = np.concatenate([[0], np.cumsum(labelled, dtype=np.int64)])
    trained = before[offsets[1:]] - before[offsets[:-1]]
    return TokenStore(ids.astype(np.int32), labelled, offsets, trained.astype(np.int32))


def save_store(store: TokenStore, folder: Path) -> None:
    """Writes the arrays, one .npy file each."""
    for name, array in zip(_ARRAYS, (store.ids, store.labelled, store.offsets, store.trained), strict=True):
        np.save(folder / f"{name}.npy", array, allow_pickle=False)


def load_store(folder: Path) -> TokenStore:
    """Maps the arrays of a folder.

    Raises:
        OSError, ValueError, EOFError: a file is missing, cut short or of another length than it must be.
    """
    ids, labelled, offsets, trained = (
        np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS
    )
    if not len(ids) == len(labelled) == offsets[-1] or len(trained) != len(offsets) - 1:
        raise ValueError("arrays of different lengths")
    return TokenStore(ids, labelled, offsets, trained)
