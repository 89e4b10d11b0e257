"""Checks of this machine and its packages, with remedies; does not import torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse

from packaging.requirements import Requirement

from halftune.core.files import cache_dir
from halftune.core.optional import pip_line, version_of
from halftune.hardware import Hardware
from halftune.hardware.probe import driver_version

Status = Literal["ok", "note", "fail"]

# distribution → what it is for
OPTIONAL = {
    "flash-attn": "FlashAttention-2's package; torch has its own kernels",
    "flash-linear-attention": "fast kernels for linear attention",
    "causal-conv1d": "fast short convolutions of hybrid models",
    "tensorboard": "logging to TensorBoard",
    "wandb": "logging to Weights & Biases",
    "mlflow": "logging to MLflow",
    "swanlab": "logging to SwanLab",
    "trackio": "logging to Trackio",
}
REQUIRED = ("transformers", "peft", "accelerate", "datasets", "safetensors")
# CUDA major that torch was built for → lowest driver (Linux): table 2 of the CUDA toolkit's release notes
LOWEST_DRIVER = {11: 450, 12: 525, 13: 580}
# torch's wheels of CUDA 12.8 and later have no code for devices before Turing, those before 12.8 none for Blackwell
_TURING, _BLACKWELL, _CUDA_OF_BLACKWELL = (7, 5), (10, 0), (12, 8)
_LITTLE_DISK = 10 * 2**30
_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        name: what.
        status: ``ok``, ``note`` (works, but look), ``fail`` (a run would not).
        what: what was found.
        remedy: what to do; empty if nothing.
    """

    name: str
    status: Status
    what: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return the check as JSON data."""
        return asdict(self)


def environment(hardware: Hardware, *, folder: Path, needed_bytes: int = 0) -> list[Check]:
    """Check devices, torch, required and optional packages, disk and hub.

    Args:
        hardware: this machine, probed.
        folder: where the run writes.
        needed_bytes: what a checkpoint takes there.
    """
    return [
        Check("python", "ok", platform.python_version()),
        *_devices(hardware),
        *_torch(hardware),
        *_devices_of_build(hardware, torch_cuda()),
        *_required(),
        *_ranges(),
        *_optional(hardware),
        *_builds(),
        _disk(folder, needed_bytes),
        _hub(),
    ]


def _devices(hardware: Hardware) -> Iterator[Check]:
    driver = driver_version()
    if driver:
        yield Check("driver", "ok", f"NVIDIA {driver}")
    for device in dict.fromkeys(hardware.devices):
        count = hardware.devices.count(device)
        shown = f"{count} × {device.name}" if count > 1 else device.name
        capability = f", compute capability {device.capability[0]}.{device.capability[1]}" if device.capability else ""
        yield Check("device", "ok", f"{shown}, {device.memory_bytes / 2**30:.0f} GiB{capability}")
    for note in hardware.notes:
        yield Check("device", "note", note)


def _torch(hardware: Hardware) -> Iterator[Check]:
    version = hardware.version("torch")
    if version is None:
        yield Check("torch", "fail", "not installed", "pip install torch")
        return
    cuda = torch_cuda()
    yield Check("torch", "ok", f"{version}{f', built for CUDA {cuda}' if cuda else ''}")
    driver = driver_version()
    if cuda and driver:
        lowest = LOWEST_DRIVER.get(int(cuda.partition(".")[0]), 0)
        if int(driver.partition(".")[0]) < lowest:
            remedy = f"update the driver to {lowest} or newer, or take a torch for an older CUDA"
            yield Check("driver", "fail", f"{driver} is too old for torch's CUDA {cuda}", remedy)
    triton = hardware.version("triton")
    if triton is None:
        status = "note" if hardware.kind in ("cuda", "rocm") else "ok"
        yield Check(
            "triton", status, "not installed: no Triton kernels", "pip install triton" if status != "ok" else ""
        )
        return
    yield Check("triton", "ok", triton)


def _devices_of_build(hardware: Hardware, cuda: str | None) -> Iterator[Check]:
    """Whether torch's CUDA has code for each device."""
    if cuda is None:
        return
    version = tuple(map(int, f"{cuda}.0".split(".")[:2]))
    for device in dict.fromkeys(hardware.devices):
        if device.kind != "cuda" or device.capability is None:
            continue
        what = f"torch's CUDA {cuda} has no code for {device.name}"
        if version >= _CUDA_OF_BLACKWELL and device.capability < _TURING:
            yield Check("torch", "fail", what, "install torch built for CUDA 12.6")
        if version < _CUDA_OF_BLACKWELL and device.capability >= _BLACKWELL:
            yield Check("torch", "fail", what, "install torch built for CUDA 12.8 or newer")


def _ranges() -> Iterator[Check]:
    """Installed packages whose versions halftune does not support, with one line that mends them all."""
    wrong = dict(_unsupported())
    if wrong:
        remedy = "pip install " + " ".join(f'"{one}"' for one in wrong)
        if any(one.startswith("torch") for one in wrong) and torch_cuda():
            remedy += f", with the index of torch's builds for CUDA {torch_cuda()}"
        yield Check("versions", "fail", f"not supported: {', '.join(wrong.values())}", remedy)


def _unsupported() -> Iterator[tuple[str, str]]:
    """Requirement, and the installed package that does not meet it."""
    try:
        lines = requires("halftune") or ()
    except PackageNotFoundError:  # run from its sources
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = version_of(requirement.name)
        if version and not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name}{requirement.specifier}", f"{requirement.name} {version}"


def _required() -> Iterator[Check]:
    for name in REQUIRED:
        version = version_of(name)
        if version is None:
            yield Check(name, "fail", "not installed", f"pip install {name}")
        else:
            yield Check(name, "ok", version)


def _optional(hardware: Hardware) -> Iterator[Check]:
    for name, what in OPTIONAL.items():
        version = version_of(name)
        if version is not None:
            yield Check(name, "ok", version)
        else:
            yield Check(name, "note", f"not installed ({what})", pip_line(name))
    if version_of("flash-attn") and hardware.kind == "cpu":
        yield Check("flash-attn", "note", "installed, but no device supports it")


def _builds() -> Iterator[Check]:
    """Compare the CUDA and torch versions that binary packages were built for with the installed torch."""
    cuda, torch = torch_cuda(), version_of("torch")
    for name in ("flash-attn", "causal-conv1d", "mamba-ssm", "flash-attn-3"):
        if what := _built_for_another(version_of(name) or "", torch or "", cuda):
            yield Check(name, "fail", what, f"pip install --force-reinstall --no-build-isolation {name}")
    local = re.search(r"\+cu(\d+)", torch or "")
    if local and cuda and cuda.replace(".", "") != local.group(1):
        yield Check("torch", "fail", f"{torch} says that it was built for CUDA {cuda}", "reinstall torch")


def _built_for_another(version: str, torch: str, cuda: str | None) -> str:
    """What a binary package was built for, by its version (``2.8.3+cu12torch2.8``); empty if that is installed."""
    found = re.search(r"\+cu(\d+)torch(\d+\.\d+)", version)
    if not found or not torch:
        return ""
    built_cuda, built_torch = found.group(1)[:2], found.group(2)
    if cuda is None or cuda.partition(".")[0] != built_cuda:
        return f"{version} was built for CUDA {built_cuda}, torch for {f'CUDA {cuda}' if cuda else 'no CUDA'}"
    if not torch.startswith(f"{built_torch}."):
        return f"{version} was built for torch {built_torch} (installed: {torch})"
    return ""


def _disk(folder: Path, needed: int) -> Check:
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    shown = f"{free / 2**30:.0f} GiB free at {there}"
    if needed > free:
        what = f"{shown}; a checkpoint needs {needed / 2**30:.1f} GiB"
        return Check("disk", "fail", what, "free some, or write training.output_dir elsewhere")
    if free < _LITTLE_DISK:
        return Check("disk", "note", shown, "checkpoints and downloads need space")
    return Check("disk", "ok", shown)


def _hub() -> Check:
    """Check that the hub is reachable, by a connection without a request."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return Check("hub", "note", "HF_HUB_OFFLINE is set: only what is in the cache", "unset it to download")
    if importlib.util.find_spec("huggingface_hub") is None:
        return Check("hub", "fail", "huggingface_hub is not installed", "pip install huggingface_hub")
    from huggingface_hub import constants

    address = urlparse(constants.ENDPOINT)
    host, port = str(address.hostname), address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=_TIMEOUT_S).close()
    except OSError as error:
        remedy = "check the network, HF_ENDPOINT and proxies; folders and the cache work without"
        return Check("hub", "note", f"{host} cannot be reached: {error}", remedy)
    return Check("hub", "ok", f"{host} answers; the cache is {cache_dir()}")


def torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for, from its files; None without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.M)
    return found.group(1) if found else None
