"""Distances between a target's log-probabilities and those of the trained and the base model."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any

from halftune.verify.probes import Probes
from halftune.verify.targets import Seen

_SIGMAS = 3.0  # of chance


def distances(probes: Probes, seen: Seen) -> dict[str, float | None]:
    """See ``Report.numbers``; ``apart`` is the distance of trained and base, ``off_line`` of the target from the line
    between them, as a share of that, and ``blur`` what chance adds to ``place``."""
    found: dict[str, float | None] = dict.fromkeys(
        ("to_trained", "to_base", "place", "kl", "agreement", "apart", "off_line", "covered", "blur")
    )
    rows = []
    for probe, values in zip(probes.probes, seen.logprobs, strict=False):
        base = probe.base or [None] * len(values)
        rows += list(zip(values, probe.logprobs, base, strict=False))
    if not rows:
        return found
    found["covered"] = len(rows) / sum(len(probe.answer) for probe in probes.probes)
    found["to_trained"] = _mean(abs(own - trained) for own, trained, _ in rows)
    if all(base is not None for _, _, base in rows):
        moved = [(own - base, trained - base) for own, trained, base in rows if base is not None]
        whole = sum(trained**2 for _, trained in moved)
        found["to_base"] = _mean(abs(own) for own, _ in moved)
        found["apart"] = _mean(abs(trained) for _, trained in moved)
        if whole:
            place = found["place"] = sum(own * trained for own, trained in moved) / whole
            off_line = found["off_line"] = (sum((own - place * trained) ** 2 for own, trained in moved) / whole) ** 0.5
            found["blur"] = _SIGMAS * off_line / len(rows) ** 0.5
    pairs = [
        (own, place[0][0])
        for probe, likeliest in zip(probes.probes, seen.likeliest, strict=False)
        for own, place in zip(likeliest, probe.top, strict=False)
    ]
    if pairs:
        found["agreement"] = _mean(own == ours for own, ours in pairs)
    if seen.of_top:
        found["kl"] = _mean(
            _kl([value for _, value in place], own)
            for probe, rows_of in zip(probes.probes, seen.of_top, strict=True)
            for place, own in zip(probe.top, rows_of, strict=True)
        )
    return found


def _kl(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """KL divergence of the likeliest tokens' probabilities, and of all others together; at most the whole one's."""
    p, q = [exp(one) for one in ours], [exp(one) for one in theirs]
    p, q = [*p, max(1 - sum(p), 1e-9)], [*q, max(1 - sum(q), 1e-9)]
    return max(sum(one * log(one / max(other, 1e-30)) for one, other in zip(p, q, strict=True)), 0.0)


def _mean(values: Any) -> float:
    found = [float(one) for one in values]
    return sum(found) / len(found)
