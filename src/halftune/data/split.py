"""Training or evaluation examples from one or several token stores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from halftune.data.example import Example, Segment
from halftune.data.order import Span
from halftune.data.store import TokenStore

SHOWN = 32  # rows listed per file in a message


class TokenizedSplit:
    """Training or evaluation examples.

    Attributes:
        lengths: int32[N], tokens per example.
        longest: int32[N], tokens of the longest segment per example.
        trained: int32[N], labelled tokens per example.

    Args:
        stores: tokenised sources.
        positions: int64[N], indices into the concatenated stores; may repeat.
    """

    def __init__(self, stores: Sequence[TokenStore], positions: np.ndarray) -> None:
        self._stores, self._positions = list(stores), positions
        self._starts = np.cumsum([0, *(len(store) for store in stores)])
        self.lengths = _gather([store.lengths for store in stores], positions)
        self.longest = _gather([store.longest for store in stores], positions)
        self.trained = _gather([store.trained for store in stores], positions)

    def __len__(self) -> int:
        return len(self._positions)

    def example(self, index: int) -> Example:
        """The whole example at an index."""
        store, place = self._find(index)
        return store.example(place)

    def where(self, indices: Iterable[int]) -> str:
        """The source rows of examples, for messages: ``a.jsonl line 3, 17; b.csv line 5``."""
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

    def part(self, span: Span) -> Example:
        """The example of a span; an example of one segment is cut to the span's tokens."""
        whole = self.example(span.sample)
        first, *others = whole.segments
        if others:
            return whole
        part = slice(span.start, span.stop)
        return Example((Segment(first.input_ids[part], first.loss_mask[part]),), whole.columns)


def _listed(numbers: list[int]) -> str:
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN])) + more


def _gather(arrays: list[np.ndarray], positions: np.ndarray) -> np.ndarray:
    return np.concatenate(arrays)[positions] if arrays else np.zeros(0, dtype=np.int32)
