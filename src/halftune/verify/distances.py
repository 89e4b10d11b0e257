"""Distances between a target's log-probabilities and those of the trained and the base model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halftune.verify.probes import Probes

Rows = Sequence[Sequence[float]]  # [P][T], log-probabilities


def distances(probes: Probes, seen: Rows) -> dict[str, float | None]:
    """See ``Report.numbers``; ``apart`` is the distance of trained and base, ``off_line`` of the target from the line
    between them, as a share of that."""
    found: dict[str, float | None] = dict.fromkeys(("to_trained", "to_base", "place", "apart", "off_line", "covered"))
    rows = []
    for probe, values in zip(probes.probes, seen, strict=False):
        base = probe.base or [None] * len(values)
        rows += list(zip(values, probe.logprobs, base, strict=False))
    if not rows:
        return found
    found["covered"] = len(rows) / sum(len(probe.answer) for probe in probes.probes)
    found["to_trained"] = mean(abs(own - trained) for own, trained, _ in rows)
    if all(base is not None for _, _, base in rows):
        moved = [(own - base, trained - base) for own, trained, base in rows if base is not None]
        whole = sum(trained**2 for _, trained in moved)
        found["to_base"] = mean(abs(own) for own, _ in moved)
        found["apart"] = mean(abs(trained) for _, trained in moved)
        if whole:
            place = found["place"] = sum(own * trained for own, trained in moved) / whole
            found["off_line"] = (sum((own - place * trained) ** 2 for own, trained in moved) / whole) ** 0.5
    return found


def mean(values: Iterable[float]) -> float:
    """The mean; 0 of nothing."""
    found = [float(one) for one in values]
    return sum(found) / max(len(found), 1)
