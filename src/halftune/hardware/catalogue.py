"""Descriptions of machines, for plans without the hardware and for tests."""

from __future__ import annotations

import re
from dataclasses import replace

from halftune.core.errors import PlanError
from halftune.core.table import did_you_mean
from halftune.hardware import Device, Hardware, Kind

MIB, GIB = 2**20, 2**30
MOST_DEVICES = 1024
# Packages of a default installation; flash-attn and flash-linear-attention are optional.
_PACKAGES = (("torch", "2.13.0"), ("transformers", "5.23.0"))
_TRITON = ("triton", "3.7.1")


def _cuda(name: str, mib: int, major: int, minor: int) -> Hardware:
    return _machine(Device("cuda", name, mib * MIB, capability=(major, minor)), host=128 * GIB, cores=16)


def _rocm(name: str, gib: int, arch: str) -> Hardware:
    return _machine(Device("rocm", name, gib * GIB, arch=arch), host=128 * GIB, cores=16)


def _mps(name: str, gib: int, macos: int) -> Hardware:
    features = frozenset(f"macos{version}" for version in range(13, macos + 1))
    return _machine(Device("mps", name, gib * GIB, arch="arm64", features=features), host=gib * GIB, cores=8)


def _cpu(name: str, *features: str, arch: str = "x86_64") -> Hardware:
    return _machine(Device("cpu", name, 64 * GIB, arch=arch, features=frozenset(features)), host=64 * GIB, cores=16)


def _machine(device: Device, *, host: int, cores: int) -> Hardware:
    triton = (_TRITON,) if device.kind in ("cuda", "rocm", "xpu") else ()
    return Hardware(device.name, (device,), host, cores, (*_PACKAGES, *triton))


CATALOGUE: dict[str, Hardware] = {
    "p100": _cuda("Tesla P100", 16_280, 6, 0),
    "v100": _cuda("Tesla V100", 16_160, 7, 0),
    "v100-32": _cuda("Tesla V100 32GB", 32_510, 7, 0),
    "t4": _cuda("Tesla T4", 15_095, 7, 5),
    "gtx1660": _cuda("GeForce GTX 1660 Ti", 5_944, 7, 5),
    "rtx2080": _cuda("GeForce RTX 2080", 7_982, 7, 5),
    "rtx3090": _cuda("GeForce RTX 3090", 24_576, 8, 6),
    "rtx4090": _cuda("GeForce RTX 4090", 24_564, 8, 9),
    "rtx5090": _cuda("GeForce RTX 5090", 32_607, 12, 0),
    "l4": _cuda("NVIDIA L4", 23_034, 8, 9),
    "a10": _cuda("NVIDIA A10", 23_028, 8, 6),
    "a100": _cuda("NVIDIA A100 80GB", 81_920, 8, 0),
    "a100-40": _cuda("NVIDIA A100 40GB", 40_960, 8, 0),
    "h100": _cuda("NVIDIA H100", 81_559, 9, 0),
    "h200": _cuda("NVIDIA H200", 143_771, 9, 0),
    "b200": _cuda("NVIDIA B200", 183_359, 10, 0),
    "mi100": _rocm("AMD Instinct MI100", 32, "gfx908"),
    "mi250": _rocm("AMD Instinct MI250 (one die)", 64, "gfx90a"),
    "mi300x": _rocm("AMD Instinct MI300X", 192, "gfx942"),
    "mi355x": _rocm("AMD Instinct MI355X", 288, "gfx950"),
    "rx7900xtx": _rocm("AMD Radeon RX 7900 XTX", 24, "gfx1100"),
    "max1550": _machine(Device("xpu", "Intel Data Center GPU Max 1550", 64 * GIB), host=128 * GIB, cores=16),
    "m2": _mps("Apple M2", 24, 14),
    "m2-macos13": _mps("Apple M2 on macOS 13", 24, 13),
    "cpu": _cpu("CPU without bf16 units"),
    "cpu-avx512bf16": _cpu("CPU with AVX512-BF16", "avx512_bf16"),
    "cpu-zen4": _cpu("AMD CPU (Zen 4)", "avx512_bf16", "amd"),
    "cpu-amx": _cpu("CPU with AMX", "amx_bf16", "avx512_bf16"),
    "cpu-arm": _cpu("ARM CPU", arch="aarch64"),
    "cpu-arm-bf16": _cpu("ARM CPU (Neoverse V1)", "bf16", arch="aarch64"),
}
ALIASES = {
    "1660": "gtx1660",
    "2080": "rtx2080",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "a100-80": "a100",
    "v100-16": "v100",
    "xpu": "max1550",
    "mps": "m2",
    "mps-macos13": "m2-macos13",
    "cpu-x86": "cpu",
}


def lookup(name: str, packages: dict[str, str] | None = None) -> Hardware:
    """Return a machine description: ``t4``, ``t4x2`` or ``2xt4`` (several), ``a100+t4`` (mixed).

    Args:
        name: one or more entries of ``CATALOGUE`` (or ``ALIASES``) joined by ``+``, each with a count.
        packages: further installed distributions and their versions, e.g. ``{"flash-attn": "2.8.3"}``.

    Raises:
        PlanError: unknown entry (suggests similar ones), a count of 0 or too large, or devices of several kinds.
    """
    texts = name.lower().replace(" ", "").split("+")
    if "" in texts:
        what = "no machine given" if texts == [""] else f"{name!r}: no machine on one side of +"
        raise _unknown(what, f"use one of {', '.join(CATALOGUE)}, or for example t4x2 or a100+t4")
    parts = list(map(_part, texts))
    if (total := sum(count * len(machine.devices) for machine, count in parts)) > MOST_DEVICES:
        what = f"{name} has {total:,} devices; the maximum is {MOST_DEVICES:,}"
        raise _unknown(what, "use a smaller count")
    devices = tuple(device for machine, count in parts for device in machine.devices * count)
    kinds: set[Kind] = {device.kind for device in devices}
    if len(kinds) > 1 or (kinds == {"cpu"} and len(devices) > 1):
        raise _unknown(f"{name}: all devices of a machine must be accelerators of one kind")
    first = parts[0][0]
    installed = {**dict(first.packages), **(packages or {})}
    return replace(first, name=name, devices=devices, packages=tuple(installed.items()))


def _unknown(what: str, remedy: str = "") -> PlanError:
    return PlanError(what, where="--hardware", remedy=remedy, code="hardware.unknown_machine")


def _part(text: str) -> tuple[Hardware, int]:
    """Parse an entry with its count; names that contain x and digits (rtx4090) take precedence."""
    known = {**CATALOGUE, **{alias: CATALOGUE[target] for alias, target in ALIASES.items()}}
    if text in known:
        return known[text], 1
    for pattern in (r"(?P<name>.+)x(?P<count>\d+)", r"(?P<count>\d+)x(?P<name>.+)"):
        match = re.fullmatch(pattern, text)
        if match and match["name"] in known and int(match["count"]) > 0:
            return known[match["name"]], int(match["count"])
    bare = re.sub(r"x\d+$|^\d+x", "", text) or text
    where = "--hardware"
    what = f"unknown machine {text!r}"
    raise PlanError(what, where=where, remedy=did_you_mean(bare, known), code="hardware.unknown_machine")
