"""AMD and Intel devices from the Linux kernel's /sys, without a ROCm or Level Zero context."""

from __future__ import annotations

import os
from pathlib import Path

from halftune.hardware.facts import Device
from halftune.hardware.host import host_memory_bytes, read_text

SYS = Path("/sys")
_INTEL = "0x8086"
_DISPLAY_CLASSES = ("0x0300", "0x0380", "0x0302")
_DEVICE_MEMORY_HEAPS = (1, 2)  # public and private frame buffer


def amd_devices(root: Path = SYS) -> list[Device]:
    """Return the ROCm devices of the kernel's compute topology, in its order, filtered by ``*_VISIBLE_DEVICES``."""
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
        return None  # a CPU node
    arch = f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
    banks = [_properties(bank / "properties") for bank in (node / "mem_banks").glob("*")]
    memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _DEVICE_MEMORY_HEAPS)
    name = read_text(node / "name")
    return Device("rocm", f"AMD {name or arch}", memory or host_memory_bytes(), arch=arch)


def intel_devices(root: Path = SYS) -> list[Device]:
    """Return Intel GPUs; called only for XPU builds of torch."""
    found = []
    for card in sorted((root / "class/drm").glob("card[0-9]*")):
        device = card / "device"
        if "-" in card.name or read_text(device / "vendor") != _INTEL:
            continue
        if not read_text(device / "class").startswith(_DISPLAY_CLASSES):
            continue
        own = read_text(card / "lmem_total_bytes") or read_text(device / "tile0/physical_vram_size_bytes")
        memory = int(own, 0) if own else host_memory_bytes()
        found.append(Device("xpu", f"Intel GPU {read_text(device / 'device')}".strip(), memory))
    return found


def _properties(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in read_text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
