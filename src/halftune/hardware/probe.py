"""Probes this machine's devices, memory, processor and package versions, without importing torch.

NVIDIA devices are read by NVML, AMD's and Intel's from the Linux kernel's /sys; no device context is created.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from halftune.core.optional import version_of
from halftune.hardware import Device, Hardware

CPUINFO = Path("/proc/cpuinfo")
MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
# instruction sets (x86 "flags", ARM "Features") and vendors that decide whether bf16 is used
FEATURES = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
VENDORS = {"AuthenticAMD": "amd"}
SYS = Path("/sys")
_INTEL = "0x8086"  # vendor number of PCI
_DISPLAY_CLASSES = ("0x0300", "0x0380", "0x0302")  # of PCI: VGA, other display, 3D controller
_DEVICE_MEMORY_HEAPS = (1, 2)  # public and private frame buffer
DRIVER = Path("/proc/driver/nvidia/version")
# Packages that attention, number formats or reports depend on. Versions come from the metadata, since an importable
# folder `kernels` is not the distribution of that name.
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flash-linear-attention",
    "fla-core",
    "causal-conv1d",
    "mamba-ssm",
    "kernels",
    "bitsandbytes",
    "liger-kernel",
)
# kind of device → library that a torch build for it contains
_LIBRARIES = {"cuda": "torch_cuda", "rocm": "torch_hip", "xpu": "torch_xpu"}


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
    # 90010 is gfx90a: two decimal digits each for minor version and stepping
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


def nvidia_devices() -> tuple[list[Device], list[str]]:
    """Return the devices visible to CUDA in this process, in NVML's order, and notes on hidden devices or problems."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if DRIVER.exists():
            return [], [f"NVML fails although an NVIDIA driver is loaded ({error}): restart after a driver update"]
        return [], []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen, notes = (handles, []) if visible is None else _visible(visible, handles)
        devices = [_device(_instance(handle)) for handle in chosen]
        if len({device.name for device in devices}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            notes.append("different GPU models: set CUDA_DEVICE_ORDER=PCI_BUS_ID so that all tools number them equally")
        return devices, notes
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str:
    """Return the version of the NVIDIA driver; empty if there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        return _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _visible(visible: str, handles: list[Any]) -> tuple[list[Any], list[str]]:
    """Apply ``CUDA_VISIBLE_DEVICES`` as CUDA does: numbers or UUID prefixes, up to the first invalid entry."""
    chosen: list[Any] = []
    for entry in (part.strip() for part in visible.split(",")):
        handle = _find(entry, handles)
        if handle is None or handle in chosen:
            break
        chosen.append(handle)
    if chosen or not handles:
        return chosen, []
    said = f"is {visible!r}" if visible.strip() else "is empty"
    return [], [f"CUDA_VISIBLE_DEVICES {said}: {len(handles)} NVIDIA device{'s' * (len(handles) > 1)} hidden"]


def _find(entry: str, handles: list[Any]) -> Any | None:
    if entry.isdigit():
        return handles[int(entry)] if int(entry) < len(handles) else None
    if entry.startswith("MIG-"):
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(entry)
        except pynvml.NVMLError:
            return None
    if not entry.startswith("GPU-"):
        return None
    matching = [handle for handle in handles if _text(pynvml.nvmlDeviceGetUUID(handle)).startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _instance(handle: Any) -> Any:
    """The first MIG instance of a partitioned device (a process sees only one), else the device."""
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
            return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
    except pynvml.NVMLError:  # no MIG support, or the handle is an instance already
        pass
    return handle


def _device(handle: Any) -> Device:
    try:
        parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    except pynvml.NVMLError:
        parent = handle
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(parent)
    try:
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:  # integrated devices share the host's memory
        memory = host_memory_bytes()
    return Device("cuda", _text(pynvml.nvmlDeviceGetName(handle)), memory, capability=(int(major), int(minor)))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch: its version, and the accelerators it was built for."""

    version: str
    backends: frozenset[str]


def probe() -> Hardware:
    """Return this machine's description. Creates no CUDA context, so that processes can still be forked."""
    packages = tuple((name, version) for name in PACKAGES if (version := version_of(name)))
    build = torch_build()
    devices, notes = accelerators(build)
    memory = host_memory_bytes()
    return Hardware(
        name="this machine",
        devices=devices or (cpu_device(memory),),
        host_memory_bytes=memory,
        cpu_cores=cpu_cores(),
        packages=packages,
        notes=tuple(notes),
    )


def torch_build() -> TorchBuild | None:
    """Return the installed torch build, detected by its libraries; None if torch is not installed."""
    version, spec = version_of("torch"), importlib.util.find_spec("torch")
    if version is None or spec is None or not spec.submodule_search_locations:
        return None
    library = Path(next(iter(spec.submodule_search_locations))) / "lib"
    found = frozenset(name for name, stem in _LIBRARIES.items() if any(library.glob(f"*{stem}.*")))
    return TorchBuild(version, found)


def accelerators(build: TorchBuild | None) -> tuple[tuple[Device, ...], list[str]]:
    """Return the devices that torch can use (none: train on the CPU), and notes on those that it cannot."""
    notes: list[str] = []
    if build is None:
        notes.append("torch is not installed: pip install torch")
    if sys.platform == "darwin":
        return _apple(), notes
    nvidia, nvidia_notes = nvidia_devices()
    notes += nvidia_notes
    amd = amd_devices()
    for backend, devices, brand in (("cuda", nvidia, "CUDA"), ("rocm", amd, "ROCm")):
        if not devices or build is None:
            continue
        if backend in build.backends:
            return tuple(devices), notes
        count = f"{len(devices)} × " if len(devices) > 1 else ""
        notes.append(
            f"{count}{devices[0].name} cannot be used: torch {build.version} was built without {brand}; "
            f"reinstall torch {build.version.split('+')[0]} with {brand} (see pytorch.org)"
        )
    if build is not None and "xpu" in build.backends:
        return tuple(intel_devices()), notes
    return (), notes


def _apple() -> tuple[Device, ...]:
    """The GPU of Apple silicon; torch does not support GPUs of Intel Macs."""
    if platform.machine() != "arm64":
        return ()
    asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
    major = int((platform.mac_ver()[0] or "0").split(".")[0])
    features = frozenset(f"macos{version}" for version in range(13, major + 1))
    return (Device("mps", asked.stdout.strip() or "Apple GPU", host_memory_bytes(), arch="arm64", features=features),)
