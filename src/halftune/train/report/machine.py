"""What the run was made with: versions, machine, commit, data; and the whole configuration."""

from __future__ import annotations

import shlex
from typing import Any

from markupsafe import Markup

from halftune.core.templates import render
from halftune.train.quantities import size
from halftune.train.report.record import HERE, Record


def machine(record: Record) -> Markup:
    """The section on environment and configuration."""
    environment = record.environment
    if not environment and not record.config_text:
        return Markup()
    return render(
        HERE,
        "environment",
        rows=[*_hardware(environment.get("hardware") or {}), *_software(environment)],
        packages=environment.get("packages") or {},
        git=environment.get("git"),
        command=shlex.join(environment.get("command") or ()),
        data=environment.get("data") or {},
        config_text=record.config_text,
    )


def _hardware(hardware: dict[str, Any]) -> list[tuple[str, str]]:
    rows, devices = [], hardware.get("devices", ())
    for name in dict.fromkeys(device["name"] for device in devices):
        same = [device for device in devices if device["name"] == name]
        times = f"{len(same)} × " if len(same) > 1 else ""
        rows.append(("device", f"{times}{name}, {size(same[0]['memory_bytes'])}"))
    if hardware.get("cpu_cores"):
        rows.append(("host", f"{hardware['cpu_cores']} cores, {size(hardware['host_memory_bytes'])}"))
    return rows + [("note", note) for note in hardware.get("notes", ())]


def _software(environment: dict[str, Any]) -> list[tuple[str, str]]:
    python = environment.get("python")
    return [
        ("halftune", environment.get("halftune", "")),
        ("Python", f"{python} on {environment.get('platform', '')}" if python else ""),
    ]
