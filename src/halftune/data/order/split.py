"""Training or evaluation examples from one or several token stores, mixed by weight, and how full their rows are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from halftune.config.run import RunConfig
from halftune.core.errors import DataError
from halftune.core.log import get_logger
from halftune.data.order.cache import ordered
from halftune.data.order.epoch import BatchRule, Span, epoch_rows, padded_batches, padded_tokens
from halftune.data.store import Example, Segment, TokenStore
from halftune.plan.tree import batch_size

log = get_logger(__name__)

_CHOOSE, _HOLD_OUT, _WEIGH = 1, 2, 3  # independent random streams of one seed


def choose_rows(total: int, samples: int | None, *, seed: int, first: bool = False) -> np.ndarray:
    """int64, ascending: indices of ``samples`` random rows, or of the first ones; all rows if ``samples`` is None."""
    if samples is None or samples >= total:
        return np.arange(total)
    if first:
        return np.arange(samples)
    return np.sort(np.random.default_rng([seed, _CHOOSE]).permutation(total)[:samples])


def contents(stores: Sequence[TokenStore]) -> np.ndarray:
    """int64, one content id per sample of all stores: equal for equal tokens, numbered by first occurrence."""
    numbers: dict[bytes, int] = {}
    found = []
    for store in stores:
        for place, (start, end) in enumerate(pairwise(store.offsets[store.firsts].tolist())):
            digest = hashlib.blake2b(store.ids[start:end].tobytes() + store.digests(place), digest_size=16).digest()
            found.append(numbers.setdefault(digest, len(numbers)))
    return np.array(found, dtype=np.int64)


def without_copies(stores: Sequence[TokenStore], ranges: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The positions of ``ranges`` without samples whose tokens, labels and columns an earlier one has.

    Args:
        stores: tokenised sources.
        ranges: int64, positions in the concatenated stores, one array for each.
    """
    seen, firsts, start = set[bytes](), list[int](), 0
    for store in stores:
        for place, (first, last) in enumerate(pairwise(store.offsets[store.firsts].tolist())):
            parts = (store.ids[first:last], store.labelled[first:last], store.columns[place])
            content = b"".join(part.tobytes() for part in parts) + store.digests(place)
            digest = hashlib.blake2b(content, digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                firsts.append(start + place)
        start += len(store)
    log.info("data.deduplicate: %s of %s samples are copies", start - len(firsts), start)
    return [np.intersect1d(places, firsts) for places in ranges]


def hold_out(content: np.ndarray, share: float, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split sample positions into (kept, held out), both ascending.

    Duplicates stay together: one copy is held out and none is kept, or all are kept. So no evaluation sample is
    trained, even if a source is listed twice.

    Args:
        content: int64[N], the result of ``contents``.
        share: below 1 a fraction of the distinct samples, otherwise their number; 0 holds nothing out.
        seed: ``training.seed``.

    Raises:
        DataError: nothing would be left to train on.
    """
    firsts = np.unique(content, return_index=True)[1]
    total = len(firsts)
    count = count_held_out(share, total, len(content))
    chosen = np.random.default_rng([seed, _HOLD_OUT]).permutation(total)[:count]
    held = np.zeros(total, dtype=bool)
    held[chosen] = True
    return np.flatnonzero(~held[content]), np.sort(firsts[chosen])


def count_held_out(share: float, different: int, samples: int) -> int:
    """Number of samples that ``eval_split`` holds out.

    Args:
        share: as for :func:`hold_out`.
        different: number of distinct samples.
        samples: number of samples, copies included.

    Raises:
        DataError: nothing would be left to train on.
    """
    count = round(share * different) if share < 1 else round(share)
    count = max(count, 1) if share > 0 else 0
    if count >= different > 0:
        copies = f" different ones ({samples} with copies)" if samples > different else ""
        raise DataError(
            f"would hold {count} samples out, and there are only {different}{copies}",
            where="data.eval_split",
            remedy="hold fewer out, or give evaluation data of its own under data.eval",
            code="data.holdout_too_large",
        )
    return count


def weigh(positions: Sequence[np.ndarray], weights: Sequence[float], *, seed: int) -> np.ndarray:
    """Repeat or subsample each source's positions by its weight: 2 repeats each sample, 0.5 uses half of them.

    Args:
        positions: int64 arrays, one for each source.
        weights: one for each source, above 0.
        seed: ``training.seed``; selects the samples of a fractional weight.

    Returns:
        int64, all positions of an epoch.
    """
    shown = []
    for number, (places, weight) in enumerate(zip(positions, weights, strict=True)):
        whole, part = int(weight), weight % 1
        shown += [places] * whole
        if part and len(places):
            random = np.random.default_rng([seed, _WEIGH, number])
            shown.append(np.sort(random.permutation(places)[: max(1, round(part * len(places)))]))
    return np.concatenate(shown) if shown else np.zeros(0, dtype=np.int64)


def reserved(lengths: np.ndarray, config: RunConfig) -> np.ndarray:
    """Tokens of a packed row that each example gets: its own, and those by which it may become longer."""
    growth = config.method.growth
    return np.minimum(lengths + growth, config.data.max_length) if growth else lengths


@dataclass(frozen=True)
class Efficiency:
    """Share of non-padding tokens in the first epoch.

    Attributes:
        padded: share with padded batches of ``batch`` rows, or of ``tokens`` tokens; grouped by length if that is on.
        packed: share with packed rows of ``max_length``.
        packed_rows: number of packed rows.
    """

    batch: int
    padded: float
    packed: float
    packed_rows: int
    tokens: int | None = None


def efficiency(split: TokenizedSplit, config: RunConfig) -> Efficiency:
    """Compute the share of non-padding tokens in the first epoch of one process.

    Args:
        split: the training examples.
        config: reads batch size, accumulation, grouping, ``max_length`` and seed.
    """
    seed, segments = config.training.seed, config.method.segments
    capacity = config.data.max_length * segments
    rows, tokens = batch_size(config)
    forwards = config.training.gradient_accumulation_steps
    rule = BatchRule(rows * forwards, tokens, forwards, config.data.group_by_length, segments)
    cache, lengths, cut = config.data.cache, split.lengths, config.data.packing.split
    batches = ordered(padded_batches, split.longest, cache=cache, rule=rule, epoch=0, seed=seed)
    sizes = reserved(lengths, config)
    packed = ordered(epoch_rows, sizes, cache=cache, epoch=0, seed=seed, packing=True, capacity=capacity, split=cut)
    real, padded = int(lengths.sum()), padded_tokens(batches, rows, rule)
    return Efficiency(rows, real / max(padded, 1), real / max(len(packed) * capacity, 1), len(packed), tokens)


SHOWN = 32  # rows listed per file in a message


class TokenizedSplit:
    """Training or evaluation examples.

    Attributes:
        lengths: int32[N], tokens per example.
        longest: int32[N], tokens of the longest segment per example.
        trained: int32[N], labelled tokens per example.
        sets: name of an evaluation set → int64, ascending: its examples. ``""`` has those of stores without a name.
            Empty without names.

    Args:
        stores: tokenised sources.
        positions: int64[N], indices into the concatenated stores; may repeat.
        names: the evaluation set of each store, or None.
    """

    def __init__(self, stores: Sequence[TokenStore], positions: np.ndarray, names: Sequence[str | None] = ()) -> None:
        self._stores, self._positions = list(stores), positions
        self._starts = np.cumsum([0, *(len(store) for store in stores)])
        self.lengths = _gather([store.lengths for store in stores], positions)
        self.longest = _gather([store.longest for store in stores], positions)
        self.trained = _gather([store.trained for store in stores], positions)
        self.sets = self._sets(names) if any(names) else {}

    def _sets(self, names: Sequence[str | None]) -> dict[str, np.ndarray]:
        owners = np.searchsorted(self._starts, self._positions, side="right") - 1
        given = np.array([name or "" for name in names])
        return {str(name): np.flatnonzero(given[owners] == name) for name in dict.fromkeys(given)}

    def __len__(self) -> int:
        return len(self._positions)

    def example(self, index: int) -> Example:
        """The whole example at an index."""
        store, place = self._find(index)
        return store.example(place)

    def digests(self, index: int) -> bytes:
        """The digests of the images of the example at an index."""
        store, place = self._find(index)
        return store.digests(place)

    def source_row(self, index: int) -> tuple[int, str, int]:
        """Where the example at an index comes from: the number of its store, a file, and a row of it."""
        store, place = self._find(index)
        file, _, row = store.origin(place)
        return next(i for i, one in enumerate(self._stores) if one is store), file, row

    @property
    def places(self) -> np.ndarray:
        """int64[N]: the number of each example in its store."""
        return self._positions - self._starts[np.searchsorted(self._starts, self._positions, side="right") - 1]

    def origin(self, index: int) -> tuple[str, str, int]:
        """The source row of the example at an index: ``("a.jsonl", "line", 17)``."""
        store, place = self._find(index)
        return store.origin(place)

    def where(self, indices: Iterable[int]) -> str:
        """The source rows of examples, for messages: ``a.jsonl line 3, 17; b.csv line 5``."""
        rows: dict[tuple[str, str], set[int]] = {}
        for path, unit, number in map(self.origin, indices):
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
        return Example((Segment(first.input_ids[part], first.loss_mask[part], first.media),), whole.columns)


def _listed(numbers: list[int]) -> str:
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN])) + more


def _gather(arrays: list[np.ndarray], positions: np.ndarray) -> np.ndarray:
    return np.concatenate(arrays)[positions] if arrays else np.zeros(0, dtype=np.int32)
