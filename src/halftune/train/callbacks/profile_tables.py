"""From the events of torch's profiler to two small tables: time by group of operators, and by operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from halftune.train.callbacks.operator_groups import PYTHON, WAIT, group_of

SHOWN = 40  # operators that are kept


def tables(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Self times of the operators inside the step ranges, per step.

    Args:
        events: ``torch.autograd.profiler_util.FunctionEvent``s of a finished profile.
        steps: how many steps were recorded.

    Returns:
        ``groups`` and ``operators``: rows with ``name``, ``cpu_seconds`` and ``device_seconds`` (self time, per step),
        ``cpu_share`` and ``device_share`` of all of it, and for operators ``group`` and ``calls`` per step; most time
        first. ``data_wait_seconds``: per step, between the end of a step and the model's next forward.
    """
    found = list(events)
    spans = [(e.time_range.start, e.time_range.end) for e in found if e.name == PYTHON and not _on_device(e)]
    rows: dict[tuple[str, str], list[float]] = {}
    wait = 0.0
    for event in _inside(found, spans):
        if event.name == WAIT:
            wait += event.cpu_time_total
        around: list[str] = []
        outer = event.cpu_parent
        while outer is not None:
            around.append(outer.name)
            outer = outer.cpu_parent
        row = rows.setdefault((event.name, group_of(event.name, around)), [0, 0.0, 0.0])
        row[0] += 1
        row[1] += event.self_cpu_time_total
        row[2] += event.self_device_time_total
    operators = [
        {"name": name, "group": group, "calls": calls / steps, **_times(cpu, device, steps)}
        for (name, group), (calls, cpu, device) in rows.items()
    ]
    groups: dict[str, list[float]] = {}
    for (_, group), (_, cpu, device) in rows.items():
        total = groups.setdefault(group, [0.0, 0.0])
        total[0], total[1] = total[0] + cpu, total[1] + device
    summed = [{"name": name, **_times(cpu, device, steps)} for name, (cpu, device) in groups.items()]
    return {
        "groups": _ranked(summed),
        "operators": _ranked(operators)[:SHOWN],
        "data_wait_seconds": wait * 1e-6 / steps,
    }


def _times(cpu: float, device: float, steps: int) -> dict[str, float]:
    return {"cpu_seconds": cpu * 1e-6 / steps, "device_seconds": device * 1e-6 / steps}


def _ranked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With shares; by device time where there is any, else by CPU time."""
    cpu, device = (sum(row[f"{kind}_seconds"] for row in rows) for kind in ("cpu", "device"))
    for row in rows:
        row["cpu_share"] = row["cpu_seconds"] / cpu if cpu else 0.0
        row["device_share"] = row["device_seconds"] / device if device else 0.0
    return sorted(rows, key=lambda row: row["device_seconds"] if device else row["cpu_seconds"], reverse=True)


def _inside(events: list[Any], spans: list[tuple[float, float]]) -> Iterator[Any]:
    """Events on the CPU that begin inside a span (kernels are counted by the operators that launch them)."""
    spans = sorted(spans)
    index = 0
    for event in sorted(events, key=lambda event: event.time_range.start):
        if _on_device(event):
            continue
        while index < len(spans) and spans[index][1] < event.time_range.start:
            index += 1
        if index < len(spans) and spans[index][0] <= event.time_range.start:
            yield event


def _on_device(event: Any) -> bool:
    return event.device_type.name != "CPU"
