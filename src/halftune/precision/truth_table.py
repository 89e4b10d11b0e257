"""Support of bf16 and fp16, one row per kind of device, and what rounding stored weights loses.

``torch.cuda.is_bf16_supported()`` returns True on a T4, since it includes emulation: the compute capability decides.
Nothing here imports torch or reads weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from halftune.core.choice import Format
from halftune.hardware import Device

_WIDENED = {("bf16", "fp32"), ("fp16", "fp32")}  # conversions without loss
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
Answer = Literal["yes", "warn", "no"]
# Chips with double-rate fp16 and no tensor cores: GP100, Tegra X1 and X2, and TU116 and TU117,
# which have the T4's compute capability and are recognised by name (GTX 16, MX450, T400 to T2000).
_DOUBLE_FP16 = ((5, 3), (6, 0), (6, 2))
_SMALL_TURING = re.compile(r"\bGTX 16\d\d|\bMX[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b")


@dataclass(frozen=True)
class Rounding:
    """Tensors of a checkpoint that are rounded on load.

    Attributes:
        source, target: formats, ``bf16 | fp16 | fp32 | fp64``.
        names: of all these tensors, in the order of the files.
    """

    source: str
    target: str
    names: tuple[str, ...]

    @property
    def alike(self) -> tuple[str, ...]:
        """The distinct names with layer numbers replaced by ``*``."""
        return tuple(dict.fromkeys(_INDEX.sub("*", name) for name in self.names))


def roundings(stored: Mapping[str, str], target: str, keep_fp32: Iterable[str]) -> tuple[Rounding, ...]:
    """Return the tensors that are rounded when a checkpoint is loaded or exported in ``target``, by format.

    Args:
        stored: tensor name → format.
        target: format of all tensors whose names do not match ``keep_fp32``.
        keep_fp32: the plan's patterns.
    """
    patterns = tuple(keep_fp32)
    found: dict[tuple[str, str], list[str]] = {}
    for name, source in stored.items():
        to = "fp32" if any(re.search(pattern, name) for pattern in patterns) else target
        if source != to and (source, to) not in _WIDENED:
            found.setdefault((source, to), []).append(name)
    return tuple(Rounding(source, to, tuple(names)) for (source, to), names in found.items())


@dataclass(frozen=True)
class Request:
    """A row's answer to an explicitly requested format. ``reason`` is a format string with ``{device}``."""

    answer: Answer
    reason: str


@dataclass(frozen=True)
class Row:
    """A kind of device.

    Attributes:
        name: the row's name, for tests and documentation.
        rank: of several devices, the one with the lowest rank decides.
        matches: whether a device is of this kind.
        auto, auto_full: the choice of ``auto`` for LoRA and for full fine-tuning.
        auto_reason: the reason; a format string with ``{device}``.
        bf16, fp16: answers to explicit requests.
        fp8: answer for linear layers in float8.
    """

    name: str
    rank: int
    matches: Callable[[Device], bool]
    auto: Format
    auto_full: Format
    auto_reason: str
    bf16: Request
    fp16: Request
    fp8: Request = Request("no", "{device} has no float8 units that torch multiplies by rows (CUDA, from 8.9)")


def _cuda(low: tuple[int, int], below: tuple[int, int]) -> Callable[[Device], bool]:
    return lambda device: device.kind == "cuda" and low <= (device.capability or (0, 0)) < below


def _rocm(*prefixes: str) -> Callable[[Device], bool]:
    return lambda device: device.kind == "rocm" and device.arch.startswith(prefixes)


def _no_tensor_cores(device: Device) -> bool:
    small = device.capability == (7, 5) and _SMALL_TURING.search(device.name) is not None
    return device.kind == "cuda" and (small or device.capability in _DOUBLE_FP16)


def _kind(kind: str, *features: str) -> Callable[[Device], bool]:
    return lambda device: device.kind == kind and device.features.issuperset(features)


_CPU_FP16 = Request(
    "no",
    "{device} is a CPU: fp16 is slow there, and accelerate would silently use fp32",
)
_FP16 = Request("yes", "{device} does fp16 at full speed; asked for")
_NO_BF16 = Request("no", "{device} has no bf16 units (require 8.0): torch would emulate bf16 slowly")
_BF16 = Request("yes", "{device} does bf16 at full speed; asked for")

_FP8 = Request("yes", "{device} has float8 tensor cores; asked for")

TRUTH_TABLE: tuple[Row, ...] = (
    Row(
        "CUDA, compute capability 8.9 and above",
        41,
        _cuda((8, 9), (99, 0)),
        "bf16",
        "bf16",
        "{device} has bf16 tensor cores",
        _BF16,
        _FP16,
        _FP8,
    ),
    Row(
        "CUDA, compute capability 8.0 to 8.8",
        40,
        _cuda((8, 0), (8, 9)),
        "bf16",
        "bf16",
        "{device} has bf16 tensor cores",
        _BF16,
        _FP16,
    ),
    Row(
        "CUDA, fp16 at twice fp32 without tensor cores",
        22,
        _no_tensor_cores,
        "fp32",
        "fp32",
        "{device} has no tensor cores",
        _NO_BF16,
        Request("yes", "{device} does fp16 at up to twice the rate of fp32, without tensor cores; asked for"),
    ),
    Row(
        "CUDA, compute capability 7.x",
        30,
        _cuda((7, 0), (8, 0)),
        "fp16",
        "fp16",
        "{device} has fp16 tensor cores and no bf16 units (require 8.0)",
        _NO_BF16,
        _FP16,
    ),
    Row(
        "CUDA, compute capability below 7.0",
        20,
        _cuda((0, 0), (7, 0)),
        "fp32",
        "fp32",
        "{device} has no tensor cores (require 7.0)",
        _NO_BF16,
        Request("no", "{device} has no fast fp16 (tensor cores require 7.0)"),
    ),
    Row(
        "ROCm gfx90a, gfx94x, gfx95x",
        40,
        _rocm("gfx90a", "gfx94", "gfx95"),
        "bf16",
        "bf16",
        "{device} has bf16 matrix cores",
        _BF16,
        _FP16,
    ),
    Row(
        "ROCm gfx11xx, gfx12xx (RDNA 3 and 4)",
        38,
        _rocm("gfx11", "gfx12"),
        "bf16",
        "bf16",
        "{device} has bf16 matrix instructions",
        _BF16,
        _FP16,
    ),
    Row(
        "ROCm gfx908 (MI100)",
        36,
        _rocm("gfx908"),
        "bf16",
        "bf16",
        "{device} has bf16 matrix cores, at half the rate of fp16",
        Request("yes", "{device} does bf16 at half the rate of fp16, and faster than fp32; asked for"),
        _FP16,
    ),
    Row(
        "ROCm, other targets",
        20,
        _kind("rocm"),
        "fp32",
        "fp32",
        "{device} is not among the targets known to run bf16 fast (gfx908, gfx90a, gfx94x, gfx95x, gfx11xx, gfx12xx)",
        Request("warn", "{device} is not among the targets known to run bf16 at full speed; asked for"),
        Request("warn", "{device} is not among the targets known to run fp16 at full speed; asked for"),
    ),
    Row(
        "Apple MPS, macOS 14 and above",
        40,
        _kind("mps", "macos14"),
        "bf16",
        "bf16",
        "{device} supports bf16 since macOS 14",
        _BF16,
        _FP16,
    ),
    Row(
        "Apple MPS, macOS 13 and below",
        30,
        _kind("mps"),
        "fp16",
        "fp32",
        "{device} has no bf16 before macOS 14",
        Request("no", "{device} has no bf16 before macOS 14"),
        _FP16,
    ),
    Row("Intel XPU", 40, _kind("xpu"), "bf16", "bf16", "{device} has bf16 matrix engines", _BF16, _FP16),
    Row("CPU with AMX", 40, _kind("cpu", "amx_bf16"), "bf16", "bf16", "{device} has AMX bf16 tiles", _BF16, _CPU_FP16),
    Row(
        "AMD CPU with AVX512-BF16 (Zen 4 and later)",
        40,
        _kind("cpu", "avx512_bf16", "amd"),
        "bf16",
        "bf16",
        "{device} is an AMD CPU with AVX512-BF16: training in bf16 was measured 1.5 to 2 times faster than fp32",
        Request("yes", "{device} is an AMD CPU with AVX512-BF16, which does bf16 faster than fp32; asked for"),
        _CPU_FP16,
    ),
    Row(
        "CPU with AVX512-BF16, no AMX",
        30,
        _kind("cpu", "avx512_bf16"),
        "fp32",
        "fp32",
        "{device} has AVX512-BF16 and no AMX: bf16 measures 1.9 times slower than fp32 there",
        Request("warn", "{device} has AVX512-BF16 and no AMX: bf16 measures 1.9 times slower than fp32; asked for"),
        _CPU_FP16,
    ),
    Row(
        "ARM CPU with bf16",
        30,
        _kind("cpu", "bf16"),
        "fp32",
        "fp32",
        "{device} has bf16 units, and training in bf16 was not measured on ARM",
        Request("yes", "{device} has bf16 units; asked for"),
        _CPU_FP16,
    ),
    Row(
        "CPU with neither",
        20,
        _kind("cpu"),
        "fp32",
        "fp32",
        "{device} has no bf16 units",
        Request("warn", "{device} has no bf16 units: bf16 is emulated slowly; asked for"),
        _CPU_FP16,
    ),
)


def row_of(device: Device) -> Row:
    """Return a device's row (the first that matches)."""
    return next(row for row in TRUTH_TABLE if row.matches(device))


def describe(device: Device) -> str:
    """Return the device's name with the deciding fact, e.g. ``Tesla T4 (compute capability 7.5)``."""
    if device.capability is not None:
        return f"{device.name} (compute capability {device.capability[0]}.{device.capability[1]})"
    if device.kind == "rocm":
        return f"{device.name} ({device.arch})"
    return device.name
