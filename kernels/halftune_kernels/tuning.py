"""How each kernel is cut: the shipped choice, or one that was measured on this kind of GPU and is kept on disk.

Nothing is searched for while training. `tune` is asked for by name, keeps a cut only if the operator is still right
with it, and stores it per operator, GPU, dtype and key size; `prewarm` compiles what a run will need before its memory
is full.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, replace
from pathlib import Path

import torch

from halftune_kernels import cases, selfcheck
from halftune_kernels.gate import SHARED_MEMORY
from halftune_kernels.launch import Config, Rows, capability

_trial: ContextVar[dict[str, Config] | None] = ContextVar("halftune_kernels_trial", default=None)


def configuration(
    shipped: Mapping[tuple[str, bool], Rows], operator: str, kernel: str, like: torch.Tensor, size: int
) -> Config:
    """The cut of ``kernel`` for tensors as ``like`` with keys padded to ``size``: on trial, measured, or shipped."""
    gpu = capability(like.device)
    tried = (_trial.get() or {}).get(kernel)
    if tried is not None:
        return tried
    measured = _measured(operator, gpu, str(like.dtype), size).get(kernel) if like.is_cuda else None
    return measured or default(shipped, kernel, gpu, like.dtype, size)


def default(shipped: Mapping[tuple[str, bool], Rows], kernel: str, gpu: int, dtype: torch.dtype, size: int) -> Config:
    """The shipped cut of ``kernel`` for a GPU of capability ``gpu``; one that is not in the table counts as the newest
    older one, of whose family it is or which has less shared memory."""
    family = max((known for known in SHARED_MEMORY if known <= gpu), default=min(SHARED_MEMORY))
    rows = shipped[kernel, dtype != torch.float32]
    return next(config for most, gpus, config in rows if size <= most and (not gpus or family in gpus))


def tune(
    operator: str,
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    measure: Callable[[Callable[[], object]], float],
    bounds: tuple[int, ...] = (0, 8192),
) -> dict[str, Config]:
    """Measures cuts of every kernel of ``operator`` and keeps the fastest that computes and learns right.

    Args:
        operator: one with a table ``CONFIGS`` in its ``triton.py``.
        device: the GPU.
        dtype: of queries, keys and values.
        size: head size, a power of two.
        measure: runs its argument repeatedly and returns milliseconds, e.g. ``triton.testing.do_bench``.
        bounds: of the packed row that is timed.

    Returns:
        The kept cut of each kernel.
    """
    shipped = importlib.import_module(f"halftune_kernels.ops.{operator}.triton").CONFIGS
    gpu, half = capability(device), dtype != torch.float32
    kept = {name: default(shipped, name, gpu, dtype, size) for name, of_half in shipped if of_half == half}
    timed = cases.case(operator, size, bounds)

    def milliseconds(cuts: dict[str, Config]) -> float:
        token = _trial.set(cuts)
        try:
            return measure(lambda: timed.call(dtype, device, "triton"))
        except RuntimeError:  # too much shared memory for this GPU
            return float("inf")
        finally:
            _trial.reset(token)

    best = milliseconds(kept)
    for kernel, shipped_cut in list(kept.items()):
        for cut in _neighbours(shipped_cut):
            time = milliseconds(kept | {kernel: cut})
            if time < best * 0.98 and _right(operator, device, size, kept | {kernel: cut}):
                best, kept[kernel] = time, cut
    _store(_path(operator, gpu, str(dtype), size), kept)
    _measured.cache_clear()
    return kept


def prewarm(operator: str, device: torch.device, dtype: torch.dtype, size: int) -> None:
    """Compiles and runs every kernel of ``operator`` once, forward and backward, on a few rows."""
    cases.case(operator, size, (0, 80)).call(dtype, device, "triton")


def _neighbours(cut: Config) -> Iterable[Config]:
    for width in {16, 32, 64} if cut.width else {cut.width}:
        for warps in (2, 4, 8):
            for stages in (1, 2, 3):
                made = replace(cut, width=width, warps=warps, stages=stages)
                if made != cut:
                    yield made


def _right(operator: str, device: torch.device, size: int, cuts: dict[str, Config]) -> bool:
    token = _trial.set(cuts)
    try:
        return selfcheck.check(operator, device, "triton", (size,)).passed
    finally:
        _trial.reset(token)


def _path(operator: str, gpu: int, dtype: str, size: int) -> Path:
    return selfcheck.cache_dir() / "cuts" / f"{operator}-sm{gpu}-{dtype.removeprefix('torch.')}-{size}.json"


@functools.cache
def _measured(operator: str, gpu: int, dtype: str, size: int) -> dict[str, Config]:
    try:
        stored = json.loads(_path(operator, gpu, dtype, size).read_text())
        return {kernel: Config(**cut) for kernel, cut in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # none, or one of another version: the shipped cut
        return {}


def _store(path: Path, cuts: dict[str, Config]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({kernel: asdict(cut) for kernel, cut in cuts.items()}))
    part.replace(path)
