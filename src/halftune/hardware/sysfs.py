"""AMD and Intel devices as the Linux kernel lists them under /sys, without a ROCm or Level Zero context."""

from __future__ import annotations

import os
from pathlib import Path

from halftune.hardware.facts import Device
from halftune.hardware.host import host_memory_bytes

SYS = Path("/sys")
_INTEL = "0x8086"
_DISPLAY_CLASSES = ("0x0300", "0x0380", "0x0302")
_DEVICE_MEMORY_HEAPS = (1, 2)  # public and private frame buffer


def amd_devices(root: Path = SYS) -> list[Device]:
    """ROCm devices from the kernel's compute topology, in its order, after ``*_VISIBLE_DEVICES``."""
    nodes = sorted((root / "class/kfd/kfd/topology/nodes").glob("*"), key=lambda node: int(node.name))
    devices = [device for node in nodes if (device := _amd(node)) is not None]
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        visible = os.environ.get(variable)
        if visible is not None:
            numbers = [int(part) for part in visible.split(",") if part.strip().isdigit()]
            devices = [devices[number] for number in numbers if number < len(devices)]
    return devices


def _amd(node: Path) -> Device | None:
    facts = _properties(node / "properties")
    target = facts.get("gfx_target_version", 0)
    if not target or not facts.get("simd_count", 0):
        return None  # the host's processor is a node too
    arch = f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
    banks = [_properties(bank / "properties") for bank in (node / "mem_banks").glob("*")]
    memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _DEVICE_MEMORY_HEAPS)
    name = _read(node / "name")
    return Device("rocm", f"AMD {name or arch}", memory or host_memory_bytes(), arch=arch)


def intel_devices(root: Path = SYS) -> list[Device]:
    """Intel GPUs; the caller asks only where torch is an XPU build."""
    found = []
    for card in sorted((root / "class/drm").glob("card[0-9]*")):
        device = card / "device"
        if "-" in card.name or _read(device / "vendor") != _INTEL:
            continue
        if not _read(device / "class").startswith(_DISPLAY_CLASSES):
            continue
        own = _read(card / "lmem_total_bytes") or _read(device / "tile0/physical_vram_size_bytes")
        memory = int(own, 0) if own else host_memory_bytes()
        found.append(Device("xpu", f"Intel GPU {_read(device / 'device')}".strip(), memory))
    return found


def _properties(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # not there, or not for us
        return ""
