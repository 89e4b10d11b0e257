"""From the raw events of torch's profiler to two small tables: time by group of operators, and by operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from halftune.train.callbacks.profile.operator_groups import PYTHON, WAIT, group_of

SHOWN = 40  # operators that are kept


class Call(NamedTuple):
    """One call of an operator on the CPU; times in nanoseconds."""

    thread: int
    start: int
    minus_end: int  # so that sorting puts a caller before what it calls
    name: str
    id: int


def tables(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Self times of the operators inside the step ranges, per step.

    Args:
        events: ``_KinetoEvent``s of a stopped profiler, ``profiler.profiler.kineto_results.events()``. torch's own
            ``profiler.events()`` makes an object of several kilobytes of each, a gigabyte for a few steps.
        steps: how many steps were recorded.

    Returns:
        ``groups`` and ``operators``: rows with ``name``, ``cpu_seconds`` and ``device_seconds`` (self time, per step),
        ``cpu_share`` and ``device_share`` of all of it, and for operators ``group`` and ``calls`` per step; most time
        first. ``data_wait_seconds``: per step, between the end of a step and the model's next forward.
    """
    calls, on_device = _read(events)
    spans = sorted((call.start, -call.minus_end) for call in calls if call.name == PYTHON)
    rows: dict[tuple[str, str], list[float]] = {}
    groups: dict[tuple[str, tuple[str, ...]], str] = {}
    wait = 0
    for call, around, own in _inside(_self_times(calls), spans):
        if call.name == WAIT:
            wait += -call.minus_end - call.start
        stack = (call.name, around)
        if stack not in groups:
            groups[stack] = group_of(*stack)
        row = rows.setdefault((call.name, groups[stack]), [0, 0, 0])
        row[0] += 1
        row[1] += own
        row[2] += on_device.get(call.id, 0)
    operators = [
        {"name": name, "group": group, "calls": count / steps, **_times(cpu, device, steps)}
        for (name, group), (count, cpu, device) in rows.items()
    ]
    totals: dict[str, list[float]] = {}
    for (_, group), (_, cpu, device) in rows.items():
        total = totals.setdefault(group, [0, 0])
        total[0], total[1] = total[0] + cpu, total[1] + device
    summed = [{"name": name, **_times(cpu, device, steps)} for name, (cpu, device) in totals.items()]
    return {
        "groups": _ranked(summed),
        "operators": _ranked(operators)[:SHOWN],
        "data_wait_seconds": wait * 1e-9 / steps,
    }


def _read(events: Iterable[Any]) -> tuple[list[Call], dict[int, int]]:
    """The calls on the CPU, sorted; and the nanoseconds on the device of what each call launched, by its id."""
    calls: list[Call] = []
    launched: list[tuple[int, str, int]] = []
    runtime: list[tuple[int, Call]] = []
    names: dict[str, str] = {}  # one string for all calls of an operator
    for event in events:
        name = names.setdefault(event.name(), event.name())
        caller = event.linked_correlation_id()
        if event.device_type().name != "CPU":
            launched.append((caller, name, event.duration_ns()))
        elif not event.is_async() and event.start_thread_id() == event.end_thread_id():
            start = event.start_ns()
            call = Call(event.start_thread_id(), start, -start - event.duration_ns(), name, event.correlation_id())
            if caller:
                runtime.append((caller, call))
            else:
                calls.append(call)
    by_id = {call.id: call for call in calls}
    on_device: dict[int, int] = defaultdict(int)
    for caller, name, duration in launched:
        # a range appears on the device, too, under its own name: no kernel, and it covers some
        if caller in by_id and by_id[caller].name != name:
            on_device[caller] += duration
    # calls of the driver count threads in another way than operators do; their ids are another row of numbers
    calls += [
        call._replace(thread=by_id[caller].thread if caller in by_id else call.thread, id=-1)
        for caller, call in runtime
    ]
    return sorted(calls), on_device


def _self_times(calls: list[Call]) -> Iterator[tuple[Call, tuple[str, ...], int]]:
    """Every call with the names of those around it, innermost first, and its nanoseconds without those it makes."""
    stack: list[tuple[Call, tuple[str, ...], list[int]]] = []
    for call in calls:
        while stack and not _encloses(stack[-1][0], call):
            done, around, inner = stack.pop()
            yield done, around, -done.minus_end - done.start - inner[0]
        around = ()
        if stack:
            outer, outside, inner = stack[-1]
            inner[0] += -call.minus_end - call.start
            around = (outer.name, *outside)
        stack.append((call, around, [0]))
    for done, around, inner in reversed(stack):
        yield done, around, -done.minus_end - done.start - inner[0]


def _encloses(outer: Call, call: Call) -> bool:
    return outer.thread == call.thread and call.start < -outer.minus_end and -call.minus_end <= -outer.minus_end


def _inside(
    found: Iterable[tuple[Call, tuple[str, ...], int]], spans: list[tuple[int, int]]
) -> Iterator[tuple[Call, tuple[str, ...], int]]:
    """What begins inside one of a few spans."""
    for entry in found:
        if any(start <= entry[0].start <= end for start, end in spans):
            yield entry


def _times(cpu: float, device: float, steps: int) -> dict[str, float]:
    return {"cpu_seconds": cpu * 1e-9 / steps, "device_seconds": device * 1e-9 / steps}


def _ranked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With shares; by device time where there is any, else by CPU time."""
    cpu, device = (sum(row[f"{kind}_seconds"] for row in rows) for kind in ("cpu", "device"))
    for row in rows:
        row["cpu_share"] = row["cpu_seconds"] / cpu if cpu else 0.0
        row["device_share"] = row["device_seconds"] / device if device else 0.0
    return sorted(rows, key=lambda row: row["device_seconds"] if device else row["cpu_seconds"], reverse=True)
