"""What became of the data: a row per source, what was dropped or cut and why, and how long samples are."""

from __future__ import annotations

from collections import Counter
from typing import Any

from markupsafe import Markup

from halftune.core.templates import render
from halftune.train.quantities import count
from halftune.train.report.record import HERE, Record

_SHOWN = 8  # row numbers listed per reason


def dataset(record: Record) -> Markup:
    """The section on data."""
    if not record.data:
        return Markup()
    train, evaluation = record.data.get("train", ()), record.data.get("eval", ())
    sources = [("training", source) for source in train] + [("evaluation", source) for source in evaluation]
    return render(
        HERE,
        "data",
        sources=sources,
        summary=_summary(record.data),
        reasons=[row for _, source in sources for row in _reasons(source)],
        lengths=_lengths([source["lengths"] for source in train if source.get("lengths")]),
        count=count,
    )


def _summary(data: dict[str, Any]) -> list[str]:
    lines = []
    if data.get("train_samples"):
        lines.append(f"{count(data['train_samples'])} samples an epoch")
    if data.get("eval_samples"):
        lines.append(f"{count(data['eval_samples'])} for evaluation")
    if data.get("max_length"):
        lines.append(f"at most {count(data['max_length'])} tokens each")
    fed = data.get("efficiency") or {}
    if fed:
        lines.append(
            f"padded batches of {fed['batch']} are {fed['padded']:.0%} real tokens, packed rows {fed['packed']:.0%}"
        )
    return lines


def _reasons(source: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """What happened to rows: ``(dropped | cut | note, how many, why, their numbers)``."""
    rows = []
    for kind, word in (("dropped", "dropped"), ("truncated", "cut"), ("notes", "note")):
        for reason, found in (source.get(kind) or {}).items():
            places = [str(place) for place in found.get("rows", ())][:_SHOWN]
            more = ", …" if places and found.get("count", 0) > len(places) else ""
            rows.append((word, count(found.get("count", 0)), reason, ", ".join(places) + more))
    for column, number in (source.get("gaps") or {}).items():
        rows.append(("note", count(number), f"column {column} is missing, so empty there", ""))
    if source.get("unused"):
        rows.append(("note", "", f"columns that nothing reads: {', '.join(source['unused'])}", ""))
    return rows


def _lengths(listed: list[list[list[int]]]) -> list[tuple[int, int]]:
    """``(bound, samples)`` of all training sources; bins of different sources are laid over the widest ones."""
    if not listed:
        return []
    bounds = [bound for bound, _ in max(listed, key=lambda lengths: lengths[-1][0])]
    counts: Counter[int] = Counter()
    for lengths in listed:
        for bound, number in lengths:
            counts[next(i for i, wide in enumerate(bounds) if bound <= wide)] += number
    return [(bound, counts[i]) for i, bound in enumerate(bounds)] if any(counts.values()) else []
