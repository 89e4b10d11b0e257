"""Samples for training or evaluation, drawn from one or several stores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from halftune.data.order import Span
from halftune.data.sample import Sample
from halftune.data.store import TokenStore

SHOWN = 32  # rows of a file that a message lists


class TokenizedSplit:
    """Training or evaluation samples.

    Attributes:
        lengths: int32[N], tokens of each sample.
        trained: int32[N], labelled tokens of each sample.

    Args:
        stores: tokenised sources.
        positions: int64[N], which samples, counted through all stores; some may occur more than once.
    """

    def __init__(self, stores: Sequence[TokenStore], positions: np.ndarray) -> None:
        self._stores, self._positions = list(stores), positions
        self._starts = np.cumsum([0, *(len(store) for store in stores)])
        self.lengths = _gather([store.lengths for store in stores], positions)
        self.trained = _gather([store.trained for store in stores], positions)

    def __len__(self) -> int:
        return len(self._positions)

    def sample(self, index: int) -> Sample:
        """The whole sample at an index."""
        store, place = self._find(index)
        return store.sample(place)

    def where(self, indices: Iterable[int]) -> str:
        """The rows that samples were made of, for people: ``a.jsonl line 3, 17; b.csv line 5``."""
        rows: dict[tuple[str, str], set[int]] = {}
        for index in indices:
            store, place = self._find(index)
            path, unit, number = store.origin(place)
            rows.setdefault((path, unit), set()).add(number)
        return "; ".join(f"{path} {unit} {_listed(sorted(numbers))}" for (path, unit), numbers in sorted(rows.items()))

    def _find(self, index: int) -> tuple[TokenStore, int]:
        position = int(self._positions[index])
        store = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self._stores[store], position - int(self._starts[store])

    def part(self, span: Span) -> Sample:
        """What a span of a row stands for."""
        whole = self.sample(span.sample)
        return Sample(whole.input_ids[span.start : span.stop], whole.labels[span.start : span.stop])


def _listed(numbers: list[int]) -> str:
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN])) + more


def _gather(arrays: list[np.ndarray], positions: np.ndarray) -> np.ndarray:
    return np.concatenate(arrays)[positions] if arrays else np.zeros(0, dtype=np.int32)
