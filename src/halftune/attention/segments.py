"""Attention of a packed row sample by sample, without a dense mask: for CPUs and GPUs without varlen kernels.

Shapes: H query heads, G key/value heads (H a multiple of G), T tokens of the row, L tokens of one sample, D head size.
Every function is differentiable.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from halftune.core.errors import ModelError
from halftune_kernels.ops.causal_segments import causal_segments

# Rows whose samples are between these lengths run by our blocks on a CPU: torch's kernel computes the whole square
# where a sample is shorter than its block of keys, and is as fast as ours above; for short samples the calls cost more.
_MEAN_IN_BLOCKS, _LONGEST_IN_BLOCKS = 256, 1024
# Queries per call where a window cuts a long sample; smaller blocks cost more in calls than they save.
_SMALLEST_BLOCK = 128


class LengthsCache:
    """Sample lengths of the row in flight as Python ints: read from the tensor once per batch, not once per layer."""

    def __init__(self) -> None:
        self._source: weakref.ref[torch.Tensor] | None = None
        self._version = -1
        self._lengths: list[int] = []

    def of(self, cu_seq_lens: torch.Tensor) -> list[int]:
        """Lengths (zero-length samples left out) for ``cu_seq_lens`` ``[N + 1]``; reading them waits for the device."""
        # The very same tensor object reaches every layer, and the recomputation of a checkpointed layer.
        known = self._source is not None and self._source() is cu_seq_lens
        if not known or self._version != cu_seq_lens._version:
            bounds = cu_seq_lens.tolist()
            self._lengths = [end - start for start, end in pairwise(bounds) if end > start]
            self._source, self._version = weakref.ref(cu_seq_lens), cu_seq_lens._version
        return self._lengths


_lengths = LengthsCache()


@torch.compiler.disable()  # it reads lengths, which a graph cannot
def segment_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    eager: bool = False,
    **extras: Any,
) -> torch.Tensor:
    """Attention within each sample of a packed row.

    Args:
        module: the attention module; its file's ``eager_attention_forward`` is used where ``eager`` is set.
        query: ``[1, H, T, D]``.
        key, value: ``[1, G, T, D]``, in the query's dtype.
        cu_seq_lens: ``[N + 1]`` integers from 0 to T, the same for queries and keys.
        sliding_window: a token sees itself and this many minus one before it; None sees all before it.
        eager: compute by the model's own eager function, which knows the model's softcap and sinks.
        extras: passed to it.

    Returns:
        ``[1, T, H, D]``, contiguous, in the query's dtype.

    Raises:
        ModelError: a window without causality.
    """
    assert query.shape[0] == 1, "a packed row is a batch of one"
    lengths = _lengths_of_row(module, query, key, cu_seq_lens)
    if sliding_window is not None and not is_causal:
        raise ModelError("a sliding window without causality cannot be packed", remedy="data.packing: false")
    if sliding_window is not None and sliding_window >= max(lengths):
        sliding_window = None
    if eager:
        function = eager_of(module)
        mask = band_mask(max(lengths), sliding_window, query.dtype, query.device) if is_causal else None

        def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cut = mask if mask is None else mask[..., : q.shape[2], : q.shape[2]]
            return function(module, q, k, v, cut, dropout=dropout, scaling=scaling, **extras)[0]
    elif is_causal and sliding_window is None and _runs_in_blocks(query, value, lengths, dropout):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return causal_segments(query[0], key[0], value[0], lengths, scale)[None]
    else:
        key, value, gqa = _share_heads(query, key, value, masked=sliding_window is not None)

        def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            settings: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": gqa}
            if sliding_window is not None and sliding_window < q.shape[2]:
                return _windowed(q, k, v, sliding_window, settings).transpose(1, 2)
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **settings).transpose(1, 2)

    # split, not slices: its backward is one concatenation, a slice's is a row-sized tensor of zeros per sample
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    return torch.cat([one(*part) for part in parts], dim=1)


def _lengths_of_row(module: nn.Module, query: torch.Tensor, key: torch.Tensor, cu_seq_lens: torch.Tensor) -> list[int]:
    lengths = _lengths.of(cu_seq_lens)
    if not sum(lengths) == query.shape[2] == key.shape[2]:
        had, has = key.shape[2], sum(lengths)
        what = f"{type(module).__name__} attends to {had} keys where samples of a packed row have {has}"
        raise ModelError(what, remedy="data.packing: false")
    return lengths


def _runs_in_blocks(query: torch.Tensor, value: torch.Tensor, lengths: list[int], dropout: float) -> bool:
    plain = dropout == 0.0 and query.shape[-1] == value.shape[-1]
    if not plain or query.device.type != "cpu" or max(lengths) > _LONGEST_IN_BLOCKS:
        return False
    mean_of_tokens = sum(length * length for length in lengths) / sum(lengths)
    return mean_of_tokens >= _MEAN_IN_BLOCKS


def _windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, settings: dict[str, Any]) -> torch.Tensor:
    """One sample longer than its window, ``[1, H, L, D]``: each block of queries sees its own and the block before."""
    block = max(window, _SMALLEST_BLOCK)
    mask = _block_mask(block, window, q.device)
    blocks = [tensor.split(block, 2) for tensor in (q, k, v)]
    outputs = []
    for index, (q_block, k_block, v_block) in enumerate(zip(*blocks, strict=True)):
        size = q_block.shape[2]
        if index == 0:
            cut = mask[:size, block : block + size]
        else:
            k_block = torch.cat([blocks[1][index - 1], k_block], dim=2)
            v_block = torch.cat([blocks[2][index - 1], v_block], dim=2)
            cut = mask[:size, : block + size]
        outputs.append(F.scaled_dot_product_attention(q_block, k_block, v_block, attn_mask=cut, **settings))
    return torch.cat(outputs, dim=2)


def _share_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, masked: bool
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Keys and values, and whether the kernel is to share them between query heads; repeated where it cannot."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value, False
    # On CUDA only the flash kernel shares heads: half formats, no mask, compute capability 8.0 or higher.
    half = key.dtype in (torch.float16, torch.bfloat16)
    if not key.is_cuda or (half and not masked and torch.cuda.get_device_capability(key.device) >= (8, 0)):
        return key, value, True
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), False


@lru_cache(maxsize=8)
def _block_mask(block: int, window: int, device: torch.device) -> torch.Tensor:
    """``[block, 2 · block]``, True where query i of a block sees key j of the block before and its own."""
    distance = torch.arange(block, device=device)[:, None] + block - torch.arange(2 * block, device=device)
    return (distance >= 0) & (distance < window)


def band_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive mask ``[1, 1, at least length, same]``: 0 where a query sees a key, the dtype's lowest number elsewhere.

    Causal, and cut to the last ``window`` tokens unless that is None. Any top-left square of it is the mask of a
    shorter sample, so one serves a whole row.
    """
    return _band_mask(-(-length // 256) * 256, window, dtype, device)


@lru_cache(maxsize=4)
def _band_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < (window or length))
    mask = torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
    return mask[None, None]


def eager_of(module: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The eager attention function in the file of the model that ``module`` comes from.

    Raises:
        ModelError: that file has none (a model older than transformers' attention interface).
    """
    for cls in type(module).__mro__:
        found = vars(sys.modules[cls.__module__]).get("eager_attention_forward")
        if found is not None:
            return found
    raise ModelError(
        f"{type(module).__name__} comes without an eager attention function",
        where=type(module).__module__,
        remedy="attention: sdpa, and data.packing: false",
    )
