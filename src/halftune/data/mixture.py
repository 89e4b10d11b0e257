"""Selects the samples of an epoch: sample counts, source weights, hold-out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from halftune.core.errors import DataError
from halftune.data.store import TokenStore

_CHOOSE, _HOLD_OUT, _WEIGH = 1, 2, 3  # independent random streams of one seed


def choose_rows(total: int, samples: int | None, *, seed: int) -> np.ndarray:
    """int64, ascending: indices of ``samples`` random rows; all rows if ``samples`` is None."""
    if samples is None or samples >= total:
        return np.arange(total)
    return np.sort(np.random.default_rng([seed, _CHOOSE]).permutation(total)[:samples])


def contents(stores: Sequence[TokenStore]) -> np.ndarray:
    """int64, one content id per sample of all stores: equal for equal tokens, numbered by first occurrence."""
    numbers: dict[bytes, int] = {}
    found = []
    for store in stores:
        for start, end in pairwise(store.offsets[store.firsts].tolist()):
            digest = hashlib.blake2b(store.ids[start:end].tobytes(), digest_size=16).digest()
            found.append(numbers.setdefault(digest, len(numbers)))
    return np.array(found, dtype=np.int64)


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
