"""What became of the data: a row per source, what was dropped or cut and why, and how long samples are."""

from __future__ import annotations

from collections import Counter
from typing import Any

from halftune.train.quantities import count
from halftune.train.report.chart import histogram
from halftune.train.report.html import Content, Html, element, section, table
from halftune.train.report.record import Record

_SHOWN = 8  # row numbers listed per reason


def dataset(record: Record) -> Html:
    """The section on data."""
    train, evaluation = record.data.get("train", ()), record.data.get("eval", ())
    sources = [("training", source) for source in train] + [("evaluation", source) for source in evaluation]
    return section("data", "Data", _sources(sources), _summary(record.data), _reasons(sources), _lengths(list(train)))


def _sources(sources: list[tuple[str, dict[str, Any]]]) -> Html:
    rows: list[tuple[Content, ...]] = []
    for role, source in sources:
        tokens, trained = source.get("tokens") or 0, source.get("trained_tokens") or 0
        rows.append(
            (
                [element("code", source.get("name")), element("small", f"{role}, {source.get('format')}")],
                count(source.get("taken") or 0),
                count(source.get("kept") or 0),
                count((source.get("taken") or 0) - (source.get("kept") or 0)),
                count(source.get("samples") or 0),
                count(tokens),
                f"{trained / tokens:.1%}" if tokens else "–",
            )
        )
    head = ("source", "rows", "kept", "dropped", "samples", "tokens", "trained")
    return table(head, rows, numeric=(1, 2, 3, 4, 5, 6), kind="broad")


def _summary(data: dict[str, Any]) -> Html:
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
    return element("p", " · ".join(lines), class_="note") if lines else Html("")


def _reasons(sources: list[tuple[str, dict[str, Any]]]) -> Html:
    rows: list[tuple[Content, ...]] = []
    for _, source in sources:
        for kind, words in (("dropped", "dropped"), ("truncated", "cut"), ("notes", "note")):
            for reason, found in (source.get(kind) or {}).items():
                places = [str(place) for place in found.get("rows", ())][:_SHOWN]
                more = ", …" if found.get("count", 0) > len(places) else ""
                rows.append(
                    (words, count(found.get("count", 0)), [reason, element("small", f"rows {', '.join(places)}{more}")])
                    if places
                    else (words, count(found.get("count", 0)), reason)
                )
        for column, number in (source.get("gaps") or {}).items():
            rows.append(("note", count(number), f"column {column} is missing, so empty there"))
        if source.get("unused"):
            rows.append(("note", "", ["columns that nothing reads: ", ", ".join(source["unused"])]))
    content = table(("", "rows", "why"), rows, numeric=(1,), kind="reasons")
    return Html(element("h3", "Rows that were dropped, cut or noted") + content) if rows else Html("")


def _lengths(sources: list[dict[str, Any]]) -> Html:
    """One histogram over all training sources; bins of different sources are laid over the widest ones."""
    listed = [source["lengths"] for source in sources if source.get("lengths")]
    if not listed:
        return Html("")
    bounds = [bound for bound, _ in max(listed, key=lambda lengths: lengths[-1][0])]
    counts: Counter[int] = Counter()
    for lengths in listed:
        for bound, number in lengths:
            counts[next(i for i, wide in enumerate(bounds) if bound <= wide)] += number
    return histogram("Samples by length", [0, *bounds], [counts[i] for i in range(len(bounds))], "tokens")
