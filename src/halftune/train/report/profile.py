"""Where the time of the profiled steps went."""

from __future__ import annotations

from typing import Any

from halftune.train.quantities import duration, size
from halftune.train.report.html import Content, Html, element, section, table
from halftune.train.report.record import Record

_SHOWN = 15  # operators on the page; the trace has all


def profile(record: Record) -> Html:
    """The section on the profile, or nothing where none was recorded (``logging.profile``)."""
    found = record.profile
    if not found:
        return Html("")
    on_device = any(row["device_seconds"] for row in found["groups"])
    groups: list[tuple[Content, ...]] = [
        (row["name"], *_times(row, on_device)) for row in found["groups"] if max(_shares(row)) >= 0.001
    ]
    operators: list[tuple[Content, ...]] = [
        (element("code", row["name"]), row["group"], f"{row['calls']:,.0f}", *_times(row, on_device))
        for row in found["operators"][:_SHOWN]
    ]
    head = ("GPU time a step", "share", "CPU time a step", "share") if on_device else ("CPU time a step", "share")
    times = tuple(range(1, len(head) + 1))
    return section(
        "profile",
        "Profile",
        element("p", _sentence(found), class_="note"),
        table(("group", *head), groups, numeric=times),
        element("h3", "By operator"),
        table(
            ("operator", "group", "calls a step", *head), operators, numeric=(2, *(i + 2 for i in times)), kind="broad"
        ),
    )


def _sentence(found: dict[str, Any]) -> list[Content]:
    plain = found.get("step_seconds_unprofiled")
    beside = f" (without the profiler {duration(plain)})" if plain else ""
    words = (
        f"Steps {found['first_step']} to {found['last_step']}, {duration(found['step_seconds'])} each{beside}, "
        f"{duration(found['data_wait_seconds'])} of it between the end of a step and the next forward: waiting for "
        "data. Times are each operator's own by the clock, without those it calls. "
        f"Peak memory {size(found['memory_bytes'])}. "
    )
    return [words, "The whole trace: ", element("code", found["trace"]), ", for chrome://tracing or ui.perfetto.dev."]


def _shares(row: dict[str, Any]) -> tuple[float, float]:
    return row["device_share"], row["cpu_share"]


def _times(row: dict[str, Any], on_device: bool) -> tuple[str, ...]:
    cells = (duration(row["cpu_seconds"]), f"{row['cpu_share']:.1%}")
    return (duration(row["device_seconds"]), f"{row['device_share']:.1%}", *cells) if on_device else cells
