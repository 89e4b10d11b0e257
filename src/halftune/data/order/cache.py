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
from filelock import FileLock

from halftune.core.atomic import whole_folder
from halftune.core.files import cache_dir
from halftune.core.log import get_logger
from halftune.core.manifest import MANIFEST, damage, seal
from halftune.data.order import epoch
from halftune.data.order.epoch import BatchOrder, Order, RowOrder

log = get_logger(__name__)

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
    return _kept(make, lengths, arguments)


def _kept(make: Callable[..., Order], lengths: np.ndarray, arguments: Mapping[str, Any]) -> Order:
    """``make(lengths, **arguments)``, or the arrays that an earlier call with equal arguments wrote.

    Processes that ask at the same time wait for the one that computes. A corrupt entry is computed again. If the cache
    cannot be written, a warning is logged.
    """
    folder = cache_dir() / "order" / _key(make, lengths, arguments)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            found = _load(folder)
            if found is None:
                _save(folder, make(lengths, **arguments))
                found = _load(folder)
            if found is not None:
                return found  # type: ignore[return-value]
    except OSError as error:
        log.warning("order of the samples is not kept: %s: %s", folder.parent, error.strerror)
    return make(lengths, **arguments)


def _key(make: Callable[..., Any], lengths: np.ndarray, arguments: Mapping[str, Any]) -> str:
    """sha256 of the lengths, the arguments and the code."""
    plain = {name: asdict(value) if is_dataclass(value) else value for name, value in arguments.items()}  # type: ignore[call-overload]
    digest = hashlib.sha256(inspect.getsource(epoch).encode())
    digest.update(json.dumps([make.__name__, np.__version__, str(lengths.dtype), plain], sort_keys=True).encode())
    digest.update(lengths.tobytes())
    return digest.hexdigest()


def _save(folder: Path, made: RowOrder | BatchOrder) -> None:
    rows = made.rows if isinstance(made, BatchOrder) else made
    with whole_folder(folder) as beside:
        for name in _SPANS:
            np.save(beside / f"{name}.npy", vars(rows)[name], allow_pickle=False)
        if isinstance(made, BatchOrder):
            np.save(beside / f"{_EDGES}.npy", made.edges, allow_pickle=False)
        seal(beside, MANIFEST)


def _load(folder: Path) -> RowOrder | BatchOrder | None:
    if not folder.is_dir():
        return None
    if wrong := damage(folder, thorough=True, marker=MANIFEST):
        log.warning("corrupt order of samples in %s (%s): rebuilding", folder, wrong)
        return None
    rows = RowOrder(*(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _SPANS))
    edges = folder / f"{_EDGES}.npy"
    return BatchOrder(rows, np.load(edges, mmap_mode="r", allow_pickle=False)) if edges.exists() else rows
