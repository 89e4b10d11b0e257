"""Which samples of which source make up an epoch: sample counts, weights, a held-out share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halftune.core.errors import DataError

_CHOOSE, _HOLD_OUT, _WEIGH = 1, 2, 3  # independent random streams of one seed


def choose_rows(total: int, samples: int | None, *, seed: int) -> np.ndarray:
    """int64, ascending: the rows that ``samples`` takes, the first ones after a shuffle; all where it is None."""
    if samples is None or samples >= total:
        return np.arange(total)
    return np.sort(np.random.default_rng([seed, _CHOOSE]).permutation(total)[:samples])


def hold_out(total: int, share: float, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits positions 0 … total - 1 into (kept, held out), both ascending.

    Args:
        total: samples.
        share: below 1 a share of them, otherwise their number; 0 holds nothing out.
        seed: ``training.seed``.

    Raises:
        DataError: nothing would be left to train on.
    """
    count = round(share * total) if share < 1 else round(share)
    count = max(count, 1) if share > 0 else 0
    if count >= total > 0:
        raise DataError(
            f"data.eval_split holds {count} samples out, and there are only {total}",
            where="data.eval_split",
            remedy="hold fewer out, or give evaluation data of its own under data.eval",
        )
    chosen = np.random.default_rng([seed, _HOLD_OUT]).permutation(total)[:count]
    held = np.zeros(total, dtype=bool)
    held[chosen] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def weigh(positions: Sequence[np.ndarray], weights: Sequence[float], *, seed: int) -> np.ndarray:
    """Repeats or thins out each source's positions by its weight: 2 shows each twice, 0.5 half of them.

    Args:
        positions: int64 arrays, one for each source.
        weights: one for each source, above 0.
        seed: ``training.seed``; decides which part of a source a fractional weight shows.

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
