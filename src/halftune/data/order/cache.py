"""Orders of large splits in the cache, as memory-mapped arrays: computed once, read by all processes and starts."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halftune.core import disk_cache
from halftune.data.order import epoch, packing
from halftune.data.order.epoch import BatchOrder, Order, RowOrder

LARGE = 50_000  # samples from which an order is kept in the cache
_SPANS = ("samples", "starts", "stops", "offsets")
_EDGES = "edges"


def ordered(make: Callable[..., Order], lengths: np.ndarray, *, cache: bool, **arguments: Any) -> Order:
    """``make(lengths, **arguments)``; of a large split from the cache, which all processes of a run share.

    Args:
        make: ``epoch_rows``, ``padded_batches`` or ``by_length``.
        lengths: int[N].
        cache: ``data.cache``.
    """
    if not cache or len(lengths) < LARGE:
        return make(lengths, **arguments)
    folder = disk_cache.entry("order", _key(make, lengths, arguments))
    found = disk_cache.stored(
        folder, lambda beside: _save(beside, make(lengths, **arguments)), _load, "order of samples"
    )
    return make(lengths, **arguments) if found is None else found  # type: ignore[return-value]


def _key(make: Callable[..., Any], lengths: np.ndarray, arguments: Mapping[str, Any]) -> str:
    """sha256 of the lengths, the arguments and the code."""
    plain = {name: asdict(value) if is_dataclass(value) else value for name, value in arguments.items()}  # type: ignore[call-overload]
    digest = hashlib.sha256(f"{inspect.getsource(epoch)}{inspect.getsource(packing)}".encode())
    # another NumPy may permute otherwise: NEP 19 fixes no streams of its generators
    digest.update(json.dumps([make.__name__, np.__version__, str(lengths.dtype), plain], sort_keys=True).encode())
    digest.update(lengths.tobytes())
    return digest.hexdigest()


def _save(folder: Path, made: RowOrder | BatchOrder) -> None:
    rows = made.rows if isinstance(made, BatchOrder) else made
    for name in _SPANS:
        np.save(folder / f"{name}.npy", vars(rows)[name], allow_pickle=False)
    if isinstance(made, BatchOrder):
        np.save(folder / f"{_EDGES}.npy", made.edges, allow_pickle=False)


def _load(folder: Path) -> RowOrder | BatchOrder:
    rows = RowOrder(*(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _SPANS))
    edges = folder / f"{_EDGES}.npy"
    return BatchOrder(rows, np.load(edges, mmap_mode="r", allow_pickle=False)) if edges.exists() else rows
