"""The host: what this process may use of its processor and main memory, container limits included."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

import psutil

from halftune.hardware.facts import Device

CPUINFO = Path("/proc/cpuinfo")
MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
# what decides about bf16: instruction sets (in x86 "flags", or in ARM "Features") and who made the processor
FEATURES = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
VENDORS = {"AuthenticAMD": "amd"}


def cpu_device(memory_bytes: int) -> Device:
    """The processor as a device."""
    text = _read(CPUINFO)
    flags: set[str] = set()
    vendor: set[str] = set()
    name = platform.processor() or platform.machine()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags.update(value.split())
            break
        if key.strip() == "vendor_id" and value.strip() in VENDORS:
            vendor.add(VENDORS[value.strip()])
        if key.strip() == "model name":
            name = value.strip()
    return Device("cpu", name, memory_bytes, arch=platform.machine(), features=(FEATURES & flags) | vendor)


def host_memory_bytes() -> int:
    """Main memory that this process may use: the machine's, or the smallest limit of its control groups."""
    total = psutil.virtual_memory().total
    limits = [int(text) for text in _limits("memory", "memory.max", "memory.limit_in_bytes") if text.isdigit()]
    return min([total, *limits])


def cpu_cores() -> int:
    """Logical cores that this process may use: its affinity, and the quota of its control groups, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for text in _limits("cpu", "cpu.max", ""):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _limits(controller: str, file: str, file_v1: str) -> list[str]:
    """The contents of a limit's file in this process's control group and all groups above it, both hierarchies."""
    found = []
    for line in _read(MEMBERSHIP).splitlines():
        _, controllers, group = line.split(":", 2)
        unified = controllers == ""
        if not unified and (controller not in controllers.split(",") or not file_v1):
            continue
        base, name = (CGROUPS, file) if unified else (CGROUPS / controller, file_v1)
        place = base / group.lstrip("/")
        # Inside a container the group's path is that of the host and may not exist; its root is the container's own.
        for folder in (place, *place.parents):
            found.append(_read(folder / name))
            if folder == base:
                break
    return [text for text in found if text]


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
