"""The dtypes of the live model beside the plan, and what the guard had to cast."""

from __future__ import annotations

from typing import Any

from halftune.train.quantities import count, short_count
from halftune.train.report.html import Content, Html, element, section, table
from halftune.train.report.record import Record


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
    cells: list[tuple[Content, ...]] = [
        (
            element("code", row.get("name")),
            row.get("role"),
            element("code", row.get("dtype")),
            element("code", row.get("planned") or "–")
            if row.get("as_planned", True)
            else element("b", row["planned"], class_="bad"),
            count(row.get("tensors", 0)),
            short_count(row.get("elements", 0)),
        )
        for row in rows
    ]
    return Html(
        verdict
        + table(("module", "role", "dtype", "planned", "tensors", "numbers"), cells, numeric=(4, 5), kind="broad")
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
