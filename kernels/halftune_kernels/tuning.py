"""How each kernel is cut: the shipped choice, or one that was measured on this kind of GPU and is kept on disk.

Nothing is searched for while training. `tune` is asked for by name (``python -m halftune_kernels tune``), keeps a cut
only if the operator is still right with it, and stores it per operator, GPU, dtype and key size, with the versions and
the source that it is of: under others the shipped cut is taken. `prewarm` compiles what a run will need before its
memory is full.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, replace
from pathlib import Path

import torch

from halftune_kernels import cases, selfcheck
from halftune_kernels.gate import SHARED_MEMORY
from halftune_kernels.launch import Config, Rows, capability, power_of_two

_trial: ContextVar[dict[str, Config] | None] = ContextVar("halftune_kernels_trial", default=None)


def configuration(
    shipped: Mapping[tuple[str, bool], Rows], operator: str, kernel: str, like: torch.Tensor, size: int
) -> Config:
    """The cut of ``kernel`` for tensors as ``like`` with keys padded to ``size``: on trial, measured, or shipped."""
    gpu = capability(like.device)
    tried = (_trial.get() or {}).get(kernel)
    if tried is not None:
        return tried
    plain = default(shipped, kernel, gpu, like.dtype, size)
    measured = _measured(operator, like.device, like.dtype, size).get(kernel) if like.is_cuda else None
    return measured if measured in _neighbours(plain) else plain


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
    heads: tuple[int, int] | None = None,
) -> dict[str, Config]:
    """Measures cuts of every kernel of ``operator`` and keeps the fastest that computes and learns right.

    Args:
        operator: one with a table ``CONFIGS`` in its ``triton.py``.
        device: the GPU.
        dtype: of queries, keys and values.
        size: head size.
        measure: runs its argument repeatedly and returns milliseconds, e.g. ``triton.testing.do_bench``.
        bounds: of the packed row that is timed.
        heads: of keys and of values, see `halftune_kernels.cases.case`.

    Returns:
        The kept cut of each kernel.

    Raises:
        OSError: the cache folder cannot be written; said before anything is measured.
    """
    shipped = importlib.import_module(f"halftune_kernels.ops.{operator}.triton").CONFIGS
    gpu, half, padded = capability(device), dtype != torch.float32, power_of_two(size)
    path = _path(operator, gpu, dtype, padded)
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()
    kept = {name: default(shipped, name, gpu, dtype, padded) for name, of_half in shipped if of_half == half}
    step = _step(cases.case(operator, size, bounds, heads=heads), dtype, device)

    def milliseconds(cuts: dict[str, Config]) -> float:
        token = _trial.set(cuts)
        try:
            return measure(step)
        except selfcheck.failures():  # too much shared memory for this GPU
            return float("inf")
        finally:
            _trial.reset(token)

    best = milliseconds(kept)
    for kernel, shipped_cut in list(kept.items()):
        for cut in _neighbours(shipped_cut):
            time = milliseconds(kept | {kernel: cut})
            if time < best * 0.98 and _right(operator, device, size, kept | {kernel: cut}):
                best, kept[kernel] = time, cut
    stored = {"of": selfcheck.fingerprint(operator, device, "triton"), "cuts": {k: asdict(c) for k, c in kept.items()}}
    part = path.with_suffix(f".{os.getpid()}.part")  # another process that tunes has its own; the last one stays
    part.write_text(json.dumps(stored))
    part.replace(path)
    _measured.cache_clear()
    return kept


def tunable(operator: str) -> bool:
    """Whether ``operator`` has cuts to choose from."""
    return hasattr(importlib.import_module(f"halftune_kernels.ops.{operator}.triton"), "CONFIGS")


def prewarm(
    operator: str, device: torch.device, dtype: torch.dtype, size: int, heads: tuple[int, int] | None = None
) -> None:
    """Compiles and runs every kernel of ``operator`` on a few rows, as a run starts them, which is compiled apart from
    each other: a training step, an evaluation, and a prompt, whose states are kept for the next token.

    Args:
        operator: its name.
        device: the GPU.
        dtype: of queries, keys and values.
        size: head size.
        heads: of keys and of values, see `halftune_kernels.cases.case`: kernels are compiled for their numbers.

    Raises:
        ArgumentError: heads or a head size that the operator cannot have.
    """
    made = cases.case(operator, size, (0, 80), heads=heads)
    _step(made, dtype, device)()
    with torch.no_grad():
        _fresh(made, final=False).bind(dtype, device, "triton")[1]()
        _fresh(made, final=True).bind(dtype, device, "triton")[1]()


def _fresh(made: cases.Case, *, final: bool) -> cases.Case:
    """The case where samples start with no state; ``final``: states are returned, as for generation."""
    inputs = {name: x for name, x in made.inputs.items() if name not in ("initial_state", "initial_states")}
    options = {name: x for name, x in made.options.items() if final or name != "output_final_state"}
    return replace(made, inputs=inputs, options=options)


def _step(made: cases.Case, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Forward and backward pass as in training, and nothing else: inputs are made and moved before."""
    given, run = _fresh(made, final=False).bind(dtype, device, "triton")

    def step() -> object:
        outputs = run()
        return torch.autograd.grad(outputs, list(given.values()), [torch.ones_like(x) for x in outputs])

    return step


@functools.cache
def _neighbours(cut: Config) -> tuple[Config, ...]:
    """What is tried in place of ``cut``."""
    widths = (16, 32, 64) if cut.width else (cut.width,)
    cuts = itertools.product(widths, (2, 4, 8), (1, 2, 3))
    made = (replace(cut, width=width, warps=warps, stages=stages) for width, warps, stages in cuts)
    return tuple(one for one in made if one != cut)


def _right(operator: str, device: torch.device, size: int, cuts: dict[str, Config]) -> bool:
    token = _trial.set(cuts)
    try:
        return selfcheck.check(operator, device, "triton", (size,)).passed
    finally:
        _trial.reset(token)


def _path(operator: str, gpu: int, dtype: torch.dtype, size: int) -> Path:
    name = f"{operator}-sm{gpu}-{str(dtype).removeprefix('torch.')}-{size}.json"
    return selfcheck.cache_dir() / "cuts" / name


@functools.cache
def _measured(operator: str, device: torch.device, dtype: torch.dtype, size: int) -> dict[str, Config]:
    """What `tune` stored; nothing if it did not, the file is torn, or it is of other versions."""
    try:
        stored = json.loads(_path(operator, capability(device), dtype, size).read_text())
        if stored["of"] != selfcheck.fingerprint(operator, device, "triton"):
            return {}
        return {kernel: Config(**cut) for kernel, cut in stored["cuts"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
