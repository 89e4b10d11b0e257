"""The adapters of peft besides LoRA, one row each: their config, and the shapes of what they train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halftune.config.facts.architecture import TensorKind

Shape = tuple[int, ...]
LINEAR: tuple[TensorKind, ...] = ("linear", "router", "head")
WITH_CONV1D: tuple[TensorKind, ...] = (*LINEAR, "conv1d")
BY_LORA: tuple[TensorKind, ...] = (*WITH_CONV1D, "embedding")


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter of peft.

    Attributes:
        config: class of its config in peft.
        options: our key → peft's.
        shapes: (section, outputs, inputs, name of the module) → shapes of the trained tensors of one linear layer.
        title: its name and settings, with keys of the section in braces.
        fixed: further options of peft.
        wraps: kinds of weights that peft can adapt so, as in ``Tensor.kind``.
    """

    config: str
    options: Mapping[str, str]
    shapes: Callable[[Any, int, int, str], tuple[Shape, ...]]
    title: str
    fixed: Mapping[str, Any]
    wraps: tuple[TensorKind, ...] = LINEAR


def _oft(section: Any, rows: int, columns: int, module: str) -> tuple[Shape, ...]:
    block = _near_divisor(columns, section.block_size)
    return ((columns // block, block * (block - 1) // 2),)


def _near_divisor(size: int, wanted: int) -> int:
    """The divisor nearest to ``wanted``; of two, the smaller one."""
    divisors = [one for one in range(1, size + 1) if size % one == 0]
    return min(divisors, key=lambda one: (abs(one - wanted), one)) if wanted < size else size


def _vera(section: Any, rows: int, columns: int, module: str) -> tuple[Shape, ...]:
    return ((rows,), (section.rank,))


def _ia3(section: Any, rows: int, columns: int, module: str) -> tuple[Shape, ...]:
    inner = any(f".{module}".endswith(f".{name}") for name in section.feedforward_modules)
    return ((1, columns) if inner else (rows, 1),)


def _loha(section: Any, rows: int, columns: int, module: str) -> tuple[Shape, ...]:
    return 2 * ((rows, section.rank), (section.rank, columns))


def _lokr(section: Any, rows: int, columns: int, module: str) -> tuple[Shape, ...]:
    (out_l, out_k), (in_m, in_n) = (_factors(size, section.factor) for size in (rows, columns))
    low_rank = section.rank < max(out_k, in_n) / 2
    return ((out_l, in_m), *(((out_k, section.rank), (section.rank, in_n)) if low_rank else ((out_k, in_n),)))


def _factors(size: int, factor: int) -> tuple[int, int]:
    """Two factors of ``size``, the smaller first: ``factor`` if it divides, else near the root, at most ``factor``."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = size if factor == -1 else factor
    smaller = max(one for one in range(1, size + 1) if size % one == 0 and one * one <= size and one <= most)
    return smaller, size // smaller


ADAPTER_TYPES: dict[str, AdapterSpec] = {
    "oft": AdapterSpec("OFTConfig", {"block_size": "oft_block_size"}, _oft, "OFT in blocks of {block_size}", {"r": 0}),
    "vera": AdapterSpec("VeraConfig", {"rank": "r"}, _vera, "VeRA of rank {rank}", {}, WITH_CONV1D),
    "ia3": AdapterSpec("IA3Config", {}, _ia3, "IA3", {}, WITH_CONV1D),
    "loha": AdapterSpec("LoHaConfig", {"rank": "r", "alpha": "alpha"}, _loha, "LoHa of rank {rank}", {}),
    "lokr": AdapterSpec(
        "LoKrConfig",
        {"rank": "r", "alpha": "alpha", "factor": "decompose_factor"},
        _lokr,
        "LoKr of rank {rank}",
        {},
    ),
}
"""The rows by ``adapter.type``."""
