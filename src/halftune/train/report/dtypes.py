"""The dtypes of the live model beside the plan, and what the guard had to cast."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from halftune.core.templates import render
from halftune.train.quantities import count, short_count
from halftune.train.report.record import HERE, Record

_SHOWN = 10  # rows that are shown as they are; more are summed up


def dtypes(record: Record) -> Markup:
    """The section on dtypes as they are."""
    rows = record.dtypes.get("rows", ())
    if not rows and not record.guard:
        return Markup()
    return render(
        HERE,
        "dtypes",
        rows=rows,
        wrong=[row["name"] for row in rows if not row.get("as_planned", True)],
        tensors=sum(row.get("tensors", 0) for row in rows),
        groups=_groups(rows),
        guard=record.guard,
        shown=_SHOWN,
        count=count,
        short_count=short_count,
    )


def _groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one role, dtype and planned dtype as one."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        same = {name: str(row.get(name, "")) for name in ("role", "dtype", "planned")}
        total = groups.setdefault(tuple(same.values()), {**same, "tensors": 0, "elements": 0})
        for name in ("tensors", "elements"):
            total[name] += row.get(name, 0)
    return list(groups.values())
