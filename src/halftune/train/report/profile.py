"""Where the time of the profiled steps went."""

from __future__ import annotations

from markupsafe import Markup

from halftune.core.templates import render
from halftune.train.quantities import duration, size
from halftune.train.report.record import HERE, Record

_SHOWN = 15  # operators on the page; the trace has all


def profile(record: Record) -> Markup:
    """The section on the profile, or nothing where none was recorded (``logging.profile``)."""
    found = record.profile
    if not found:
        return Markup()
    on_device = any(row["device_seconds"] for row in found["groups"])
    return render(HERE, "profile", found=found, on_device=on_device, shown=_SHOWN, duration=duration, size=size)
