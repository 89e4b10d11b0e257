"""What the run was made with: versions, machine, commit, data; and the whole configuration."""

from __future__ import annotations

import shlex
from typing import Any

from halftune.train.quantities import size
from halftune.train.report.html import Content, Html, element, section, table
from halftune.train.report.record import Record


def machine(record: Record) -> Html:
    """The section on environment and configuration."""
    environment = record.environment
    details = element("details", element("summary", "The whole configuration, with the origin of every value"))
    if record.config_text:
        details = element(
            "details",
            element("summary", "The whole configuration, with the origin of every value"),
            element("pre", record.config_text, tabindex=0),
        )
    return section(
        "environment",
        "Environment",
        table(("", ""), [*_hardware(environment.get("hardware") or {}), *_software(environment)]),
        details if record.config_text else None,
    )


def _hardware(hardware: dict[str, Any]) -> list[tuple[Content, ...]]:
    rows: list[tuple[Content, ...]] = []
    devices = hardware.get("devices", ())
    for name in dict.fromkeys(device["name"] for device in devices):
        same = [device for device in devices if device["name"] == name]
        times = f"{len(same)} × " if len(same) > 1 else ""
        rows.append(("device", f"{times}{name}, {size(same[0]['memory_bytes'])}"))
    if hardware.get("cpu_cores"):
        rows.append(("host", f"{hardware['cpu_cores']} cores, {size(hardware['host_memory_bytes'])}"))
    return rows + [("note", note) for note in hardware.get("notes", ())]


def _software(environment: dict[str, Any]) -> list[tuple[Content, ...]]:
    rows: list[tuple[Content, ...]] = []
    if environment.get("halftune"):
        rows.append(("halftune", environment["halftune"]))
    if environment.get("python"):
        rows.append(("Python", f"{environment['python']} on {environment.get('platform', '')}"))
    packages = environment.get("packages") or {}
    if packages:
        rows.append(
            ("packages", [element("span", f"{name} {version}", class_="item") for name, version in packages.items()])
        )
    if environment.get("git"):
        changed = ", changed since" if environment["git"].get("changed") else ""
        rows.append(("git commit", [element("code", environment["git"]["commit"]), changed]))
    if environment.get("command"):
        rows.append(("command", element("code", shlex.join(environment["command"]))))
    for name, fingerprint in (environment.get("data") or {}).items():
        rows.append(("data", [element("code", name), " ", element("code", fingerprint, class_="dim")]))
    return rows
