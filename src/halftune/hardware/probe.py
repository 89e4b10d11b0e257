"""Probes this machine's devices, memory and package versions, without importing torch or creating a CUDA context."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from halftune.core.optional import version_of
from halftune.hardware.facts import Device, Hardware
from halftune.hardware.host import cpu_cores, cpu_device, host_memory_bytes
from halftune.hardware.nvidia import nvidia_devices
from halftune.hardware.sysfs import amd_devices, intel_devices

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
