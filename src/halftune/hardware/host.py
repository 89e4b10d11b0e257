"""The CPU cores and main memory that this process may use, container limits included."""

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
# instruction sets (x86 "flags", ARM "Features") and vendors that decide whether bf16 is used
FEATURES = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
VENDORS = {"AuthenticAMD": "amd"}


def cpu_device(memory_bytes: int) -> Device:
    """Return the CPU as a device."""
    text = read_text(CPUINFO)
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
    """Return the main memory that this process may use: the machine's, or the lowest cgroup limit."""
    total = psutil.virtual_memory().total
    limits = [int(text) for text in _limits("memory", "memory.max", "memory.limit_in_bytes") if text.isdigit()]
    return min([total, *limits])


def cpu_cores() -> int:
    """Return the logical cores that this process may use: its affinity, limited by cgroup quotas rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for text in _limits("cpu", "cpu.max", ""):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _limits(controller: str, file: str, file_v1: str) -> list[str]:
    """Read a limit's file in this process's cgroup and all its parents, for cgroup v1 and v2."""
    found = []
    for line in read_text(MEMBERSHIP).splitlines():
        _, controllers, group = line.split(":", 2)
        unified = controllers == ""
        if not unified and (controller not in controllers.split(",") or not file_v1):
            continue
        base, name = (CGROUPS, file) if unified else (CGROUPS / controller, file_v1)
        place = base / group.lstrip("/")
        # Inside a container the cgroup's path is the host's and may not exist; the root is the container's.
        for folder in (place, *place.parents):
            found.append(read_text(folder / name))
            if folder == base:
                break
    return [text for text in found if text]


def read_text(file: Path) -> str:
    """Read a short file of the kernel; empty if it is missing or unreadable."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
