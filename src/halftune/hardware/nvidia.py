"""NVIDIA devices by NVML, without a CUDA context."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pynvml

from halftune.hardware.facts import Device
from halftune.hardware.host import host_memory_bytes

DRIVER = Path("/proc/driver/nvidia/version")


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
