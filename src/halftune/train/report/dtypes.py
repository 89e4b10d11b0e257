"""The dtypes of the live model beside the plan, and what the guard had to cast."""

from __future__ import annotations

from typing import Any

from halftune.train.quantities import count, short_count
from halftune.train.report.html import Content, Html, element, section, table
from halftune.train.report.record import Record

_SHOWN = 10  # rows that are shown as they are; more are summed up


def dtypes(record: Record) -> Html:
    """The section on dtypes as they are."""
    return section("dtypes", "Dtypes as they are", _modules(record.dtypes.get("rows", ())), _guard(record.guard))


def _modules(rows: list[dict[str, Any]]) -> Html:
    if not rows:
        return Html("")
    wrong = [row for row in rows if not row.get("as_planned", True)]
    if wrong:
        verdict = element("p", f"Not as planned: {', '.join(row['name'] for row in wrong)}.", class_="note bad")
    else:
        tensors = sum(row.get("tensors", 0) for row in rows)
        verdict = element("p", f"All {count(tensors)} tensors of the loaded model are as planned.", class_="note")
    head = ("module", "role", "dtype", "planned", "tensors", "numbers")
    whole = table(
        head, [(element("code", row.get("name")), *_cells(row)) for row in rows], numeric=(4, 5), kind="broad"
    )
    if len(rows) <= _SHOWN:
        return Html(verdict + whole)
    groups: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        key = tuple(str(row.get(name, "")) for name in ("role", "dtype", "planned"))
        total = groups.setdefault(key, [0, 0])
        total[0], total[1] = total[0] + row.get("tensors", 0), total[1] + row.get("elements", 0)
    short = [
        _cells({"role": role, "dtype": dtype, "planned": planned, "tensors": tensors, "elements": elements})
        for (role, dtype, planned), (tensors, elements) in groups.items()
    ]
    details = element("details", element("summary", f"All {len(rows)} kinds of tensors, by name"), whole)
    return Html(verdict + table(head[1:], short, numeric=(3, 4)) + details)


def _cells(row: dict[str, Any]) -> tuple[Content, ...]:
    planned = row.get("planned") or "–"
    right = planned in ("–", row.get("dtype"))
    return (
        row.get("role"),
        element("code", row.get("dtype")),
        element("code", planned) if right else element("b", planned, class_="bad"),
        count(row.get("tensors", 0)),
        short_count(row.get("elements", 0)),
    )


def _guard(guard: dict[str, Any]) -> Html:
    """The guard's counters: a table of the sites that cast, or the sentence that none did."""
    if not guard:
        return Html("")
    sites = guard.get("sites", ())
    title = element("h3", "Guard in front of attention")
    if not sites:
        off = guard.get("mode") == "off"
        words = (
            "The guard was off." if off else f"Every operand arrived at attention in {guard.get('compute')}: no casts."
        )
        return Html(title + element("p", words, class_="note"))
    rows: list[tuple[Content, ...]] = [
        (element("code", site["site"]), count(site["casts"]), site["arrived"], element("code", site["cast_to"]))
        for site in sites
    ]
    return Html(title + table(("site", "casts", "arrived as", "cast to"), rows, numeric=(1,), kind="broad"))
