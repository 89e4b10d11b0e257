"""Chooses the implementation of each operator, with the reason."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import torch

from halftune_kernels import gate, selfcheck
from halftune_kernels.arguments import ArgumentError, check_choice
from halftune_kernels.launch import stands_in

Name = Literal["triton", "torch", "cpu", "reference"]
NAMES: tuple[str, ...] = get_args(Name)
OPERATORS = (
    *("causal_conv1d", "gated_rms_norm", "ssd", "gated_delta_rule", "kda", "rwkv7"),
    *("rms_norm", "gated_activation", "adapted_activation", "rope", "linear_cross_entropy", "float8_rows"),
)
# cpu.py is plain torch, which also runs on a GPU
_FILES: dict[str, str] = {"triton": "triton", "torch": "cpu", "cpu": "cpu", "reference": "reference"}


@dataclass(frozen=True)
class Backend:
    """The implementation of an operator, with the reason."""

    name: Name
    reason: str
    needs_check: bool = False  # whether the self-check must pass first


def module(operator: str, device: torch.device, dtype: torch.dtype, requested: str | None = None) -> ModuleType:
    """Import the implementation of ``operator`` for ``device``; see `choose` for arguments and errors."""
    backend = choose(operator, device, dtype, requested)
    return importlib.import_module(f"halftune_kernels.ops.{operator}.{_FILES[backend.name]}")


def implementation(operator: str, like: torch.Tensor, requested: str | None = None) -> ModuleType:
    """As `module`, for operators whose implementations are a forward and a backward: never the reference."""
    found = choose(operator, like.device, like.dtype, requested).name
    return importlib.import_module(f"halftune_kernels.ops.{operator}.{'triton' if found == 'triton' else 'cpu'}")


def choose(operator: str, device: torch.device, dtype: torch.dtype, requested: str | None = None) -> Backend:
    """Choose the implementation.

    Order: ``requested``; the environment variable ``HALFTUNE_KERNELS_<OPERATOR>``; ``HALFTUNE_KERNELS``; else the
    fastest that is correct on this machine, which the value ``auto`` of a variable also selects.

    Args:
        operator: one of `OPERATORS`.
        device: device of the tensors.
        dtype: of the tensors.
        requested: ``triton``, ``torch``, ``cpu``, ``reference`` or None.

    Raises:
        ArgumentError: unknown operator or implementation; Triton for tensors on the CPU, unless requested by a variable
            on a machine with a GPU.
    """
    check_choice("dispatch", "operator", operator, OPERATORS)
    variables = (f"HALFTUNE_KERNELS_{operator.upper()}", "HALFTUNE_KERNELS")
    for source, value in (("requested", requested), *((name, os.environ.get(name)) for name in variables)):
        if value and value != "auto":
            check_choice("dispatch", source, value, (*NAMES, "auto"))
            return _asked(operator, device, source, value)
    if device.type == "cpu":
        return Backend("cpu", "the tensors are on the CPU")
    return _on_gpu(operator, numbered(device), dtype)


def numbered(device: torch.device) -> torch.device:
    """The device with its index: ``cuda`` and ``cuda:0`` share a verdict."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def prove(operators: Sequence[str], device: torch.device, dtype: torch.dtype) -> None:
    """Run the outstanding self-checks of operators on a GPU side by side, before anything waits for one of them."""
    if device.type != "cuda" or torch.version.hip:
        return
    device = numbered(device)
    major, minor = torch.cuda.get_device_capability(device)
    version = triton_version()
    open_ones = [name for name in operators if expected(name, 10 * major + minor, version, dtype).needs_check]
    asked = {name: _compared(name, dtype) for name in open_ones}
    for name, found in selfcheck.verdicts(asked, device).items():
        _verdicts[name, device, asked[name]] = found


def _asked(operator: str, device: torch.device, source: str, value: str) -> Backend:
    """The implementation that an argument or a variable asks for."""
    runs = value != "triton" or device.type != "cpu" or os.environ.get("TRITON_INTERPRET") or stands_in()
    if runs:
        return Backend(value, "asked for" if source == "requested" else f"{source}={value}")  # type: ignore[arg-type]
    if source != "requested" and torch.cuda.is_available():  # meant for the GPU
        return Backend("cpu", f"the tensors are on the CPU, where {source}=triton has no effect")
    expected = "cpu, torch, reference or auto for tensors on the CPU"
    raise ArgumentError(operator, source, came="'triton'", expected=expected)


@functools.cache
def _on_gpu(operator: str, device: torch.device, dtype: torch.dtype) -> Backend:
    if device.type != "cuda" or torch.version.hip:
        return Backend("torch", "the kernels require an NVIDIA GPU")
    major, minor = torch.cuda.get_device_capability(device)
    backend = expected(operator, 10 * major + minor, triton_version(), dtype)
    if not backend.needs_check:
        return backend
    verdict = _verdict(operator, device, _compared(operator, dtype))
    if verdict.passed:
        return Backend("triton", f"{backend.reason}; self-check passed")
    return Backend("torch", f"self-check of the Triton kernel failed on this machine: {verdict.detail}")


_verdicts: dict[tuple[str, torch.device, tuple[torch.dtype, ...]], selfcheck.Verdict] = {}


def _verdict(operator: str, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> selfcheck.Verdict:
    """The self-check's verdict, once per process."""
    if (operator, device, dtypes) not in _verdicts:
        _verdicts[operator, device, dtypes] = selfcheck.verdict(operator, device, dtypes=dtypes)
    return _verdicts[operator, device, dtypes]


def _compared(operator: str, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What a self-check compares: all dtypes, so that no check runs during a training step.

    Of a scan ``dtype`` alone, since all three compile for a minute: a run starts each of its scans before the first
    step."""
    return (dtype,) if operator in gate.SCANS else selfcheck.DTYPES


def expected(operator: str, capability: int, version: tuple[int, ...] | None, dtype: torch.dtype) -> Backend:
    """Return the choice for a GPU from data alone.

    Args:
        operator: one of `OPERATORS`.
        capability: 10 * major + minor.
        version: Triton's; None if it is not installed.
        dtype: of the tensors.
    """
    if not has_triton(operator):
        return Backend("torch", "no Triton kernel for this operator yet")
    if version is None:
        return Backend("torch", "Triton is not installed")
    if version < gate.OLDEST_TRITON:
        return Backend("torch", f"Triton {_text(version)} is older than {_text(gate.OLDEST_TRITON)}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return Backend("torch", f"no kernel for {dtype}")
    if dtype == torch.bfloat16 and capability < 80:
        return Backend("torch", f"sm_{capability} does not support bfloat16")
    for row in gate.rows_for(operator, capability, version):
        if row.verdict == "refuse":
            return Backend("torch", row.reason)
        return Backend("triton", row.reason, needs_check=True)
    return Backend("triton", f"sm_{capability} with Triton {_text(version)}")


@functools.cache
def has_triton(operator: str) -> bool:
    """Whether ``operator`` has a Triton kernel in this version of the package."""
    return importlib.util.find_spec(f"halftune_kernels.ops.{operator}.triton") is not None


@functools.cache
def triton_version() -> tuple[int, ...] | None:
    """Return the version of the installed Triton; None if it is not installed."""
    try:
        text = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
