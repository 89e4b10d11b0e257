"""Tile sizes of each kernel: shipped tables by GPU, dtype and key size, without autotuning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

import torch

from halftune_kernels.gate import SHARED_MEMORY
from halftune_kernels.launch import Config, Rows, capability

_trial: ContextVar[Mapping[tuple[str, str], Config] | None] = ContextVar("halftune_kernels_trial", default=None)


def configuration(
    shipped: Mapping[tuple[str, bool], Rows], operator: str, kernel: str, like: torch.Tensor, size: int
) -> Config:
    """Return the tile sizes of ``kernel`` for tensors like ``like`` with keys padded to ``size``."""
    tried = (_trial.get() or {}).get((operator, kernel))
    return tried or default(shipped, kernel, capability(like.device), like.dtype, size)


def default(shipped: Mapping[tuple[str, bool], Rows], kernel: str, gpu: int, dtype: torch.dtype, size: int) -> Config:
    """The shipped cut of ``kernel`` for a GPU of capability ``gpu``; one that is not in the table counts as the newest
    older one, of whose family it is or which has less shared memory."""
    family = max((known for known in SHARED_MEMORY if known <= gpu), default=min(SHARED_MEMORY))
    rows = shipped[kernel, dtype != torch.float32]
    return next(config for most, gpus, config in rows if size <= most and (not gpus or family in gpus))


@contextlib.contextmanager
def on_trial(operator: str, cuts: Mapping[str, Config]) -> Iterator[None]:
    """Inside, these kernels of ``operator`` use these tile sizes, for ``scripts/tune_kernels.py``."""
    token = _trial.set({(operator, kernel): cut for kernel, cut in cuts.items()})
    try:
        yield
    finally:
        _trial.reset(token)
