"""Which implementation of an operator runs, and why: the only place that chooses."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import torch

from halftune_kernels import gate, selfcheck
from halftune_kernels.arguments import ArgumentError, check_choice
from halftune_kernels.launch import stands_in

Name = Literal["triton", "torch", "cpu", "reference"]
NAMES: tuple[str, ...] = get_args(Name)
OPERATORS = ("causal_conv1d", "gated_rms_norm", "ssd", "gated_delta_rule", "kda", "rwkv7")
# cpu.py is plain torch and fast on one thread; on a GPU the same code runs torch's own kernels.
_FILES: dict[str, str] = {"triton": "triton", "torch": "cpu", "cpu": "cpu", "reference": "reference"}


@dataclass(frozen=True)
class Backend:
    """The implementation chosen for one operator, and why."""

    name: Name
    reason: str


def module(operator: str, device: torch.device, dtype: torch.dtype, requested: str | None = None) -> ModuleType:
    """The file of ``operator`` that runs on ``device``; see `choose` for arguments and errors."""
    backend = choose(operator, device, dtype, requested)
    return importlib.import_module(f"halftune_kernels.ops.{operator}.{_FILES[backend.name]}")


def choose(operator: str, device: torch.device, dtype: torch.dtype, requested: str | None = None) -> Backend:
    """Chooses the implementation.

    Order: ``requested``; the environment variable ``HALFTUNE_KERNELS_<OPERATOR>``; ``HALFTUNE_KERNELS``; else the
    fastest that is right on this machine. A value of ``auto`` in either variable asks for the last.

    Args:
        operator: one of `OPERATORS`.
        device: where the tensors are.
        dtype: of the tensors.
        requested: ``triton``, ``torch``, ``cpu``, ``reference`` or None.

    Raises:
        ArgumentError: no such operator or implementation; Triton for tensors on the CPU, be it a variable that asks for
            it and there is no GPU.
    """
    check_choice("dispatch", "operator", operator, OPERATORS)
    for source, value in (
        ("requested", requested),
        (f"HALFTUNE_KERNELS_{operator.upper()}", os.environ.get(f"HALFTUNE_KERNELS_{operator.upper()}")),
        ("HALFTUNE_KERNELS", os.environ.get("HALFTUNE_KERNELS")),
    ):
        if value and value != "auto":
            check_choice("dispatch", source, value, (*NAMES, "auto"))
            runs = device.type != "cpu" or os.environ.get("TRITON_INTERPRET") or stands_in()
            if value == "triton" and not runs:
                if source != "requested" and torch.cuda.is_available():  # it is the GPU's that was meant
                    return Backend("cpu", f"the tensors are on the CPU, where {source}=triton has no say")
                expected = "cpu, torch, reference or auto for tensors on the CPU"
                raise ArgumentError(operator, source, came="'triton'", expected=expected)
            return Backend(value, "asked for" if source == "requested" else f"{source}={value}")  # type: ignore[arg-type]
    if device.type == "cpu":
        return Backend("cpu", "the tensors are on the CPU")
    return _on_gpu(operator, device, dtype)


@functools.cache
def _on_gpu(operator: str, device: torch.device, dtype: torch.dtype) -> Backend:
    if device.type != "cuda" or torch.version.hip:
        return Backend("torch", "the kernels are written for NVIDIA GPUs")
    major, minor = torch.cuda.get_device_capability(device)
    backend = expected(operator, 10 * major + minor, triton_version(), dtype)
    if backend.name != "triton" or "proves" not in backend.reason:
        return backend
    verdict = _verdict(operator, device)
    if verdict.passed:
        return Backend("triton", f"{backend.reason}: it did")
    return Backend("torch", f"the self-check of the Triton kernel failed on this machine: {verdict.detail}")


@functools.cache
def _verdict(operator: str, device: torch.device) -> selfcheck.Verdict:
    """Once in a process for all dtypes, which it tries: where none can be kept on disk, the second would come in the
    middle of a training step."""
    return selfcheck.verdict(operator, device)


def expected(operator: str, capability: int, version: tuple[int, ...] | None, dtype: torch.dtype) -> Backend:
    """The choice for a GPU that need not be here, from data alone.

    Args:
        operator: one of `OPERATORS`.
        capability: 10 * major + minor.
        version: Triton's, None where it is not installed.
        dtype: of the tensors.
    """
    if not has_triton(operator):
        return Backend("torch", "this operator has no Triton kernel yet")
    if version is None:
        return Backend("torch", "Triton is not installed")
    if version < gate.OLDEST_TRITON:
        return Backend("torch", f"Triton {_text(version)} is older than {_text(gate.OLDEST_TRITON)}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return Backend("torch", f"no kernel for {dtype}")
    if dtype == torch.bfloat16 and capability < 80:
        return Backend("torch", f"sm_{capability} has no bfloat16 arithmetic")
    for row in gate.rows_for(operator, capability, version):
        if row.verdict == "refuse":
            return Backend("torch", row.reason)
        return Backend("triton", f"{row.reason}; the kernel proves itself on this machine first")
    return Backend("triton", f"sm_{capability} with Triton {_text(version)}")


@functools.cache
def has_triton(operator: str) -> bool:
    """Whether ``operator`` has a Triton kernel in this version of the package."""
    return importlib.util.find_spec(f"halftune_kernels.ops.{operator}.triton") is not None


@functools.cache
def triton_version() -> tuple[int, ...] | None:
    """Version of the installed Triton, None without one."""
    try:
        text = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
