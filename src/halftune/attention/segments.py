"""Attention of a packed row sample by sample, without a dense mask: for CPUs and GPUs without varlen kernels.

Shapes: H query heads, G key/value heads (H a multiple of G), T tokens of the row, L tokens of one sample, D head size.
Every function is differentiable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from halftune.core.errors import ModelError
from halftune_kernels.constants import constant

# Rows with sample lengths in this range use our blocked kernel on a CPU. torch's kernel computes the full square for
# samples shorter than its key block, and is as fast as ours for longer ones; for short samples, calls dominate.
_MEAN_IN_BLOCKS, _LONGEST_IN_BLOCKS = 256, 1024
# Queries per call with a sliding window; for smaller blocks the calls dominate.
_SMALLEST_BLOCK = 128


@torch.compiler.disable()  # reads tensor values
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
        module: the attention module; ``eager`` uses the ``eager_attention_forward`` of its file.
        query: ``[1, H, T, D]``.
        key, value: ``[1, G, T, D]``, in the query's dtype.
        cu_seq_lens: ``[N + 1]`` integers from 0 to T, the same for queries and keys.
        sliding_window: tokens visible to each token, itself included; None for all previous tokens.
        eager: use the model's eager function, which applies its soft-capping and sinks.
        extras: passed to it.

    Returns:
        ``[1, T, H, D]``, contiguous, in the query's dtype.

    Raises:
        ModelError: a sliding window without causal attention.
    """
    assert query.shape[0] == 1, "a packed row is a batch of one"
    lengths = _lengths_of_row(module, query, key, cu_seq_lens)
    if sliding_window is not None and not is_causal:
        what = "packed rows do not support sliding windows without causal attention"
        raise ModelError(what, remedy="data.packing: false", code="attention.packing_unsupported")
    if sliding_window is not None and sliding_window >= max(lengths):
        sliding_window = None
    if eager:
        mask = band_mask(max(lengths), sliding_window, query.dtype, query.device) if is_causal else None
        one = _eager_sample(module, mask, {"dropout": dropout, "scaling": scaling, **extras})
    elif is_causal and sliding_window is None and _runs_in_blocks(query, value, lengths, dropout):
        return _in_blocks(query, key, value, lengths, scaling)
    else:
        key, value, gqa = _share_heads(query, key, value, masked=sliding_window is not None)
        one = _sdpa_sample(sliding_window, is_causal, {"dropout_p": dropout, "scale": scaling, "enable_gqa": gqa})
    # split instead of slices: backward is one concatenation instead of a row-sized zero tensor per sample
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    return torch.cat([one(*part) for part in parts], dim=1)


Sample = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(q[1, H, L, D], k[1, G, L, D], v[1, G, L, D]) -> [1, L, H, D]``"""


def _eager_sample(module: nn.Module, mask: torch.Tensor | None, settings: dict[str, Any]) -> Sample:
    """The model's eager function on one sample."""
    function = eager_of(module)

    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cut = mask if mask is None else mask[..., : q.shape[2], : q.shape[2]]
        return function(module, q, k, v, cut, **settings)[0]

    return one


def _sdpa_sample(window: int | None, is_causal: bool, settings: dict[str, Any]) -> Sample:
    """torch's attention on one sample."""

    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if window is not None and window < q.shape[2]:
            return _windowed(q, k, v, window, settings).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **settings).transpose(1, 2)

    return one


def _lengths_of_row(module: nn.Module, query: torch.Tensor, key: torch.Tensor, cu_seq_lens: torch.Tensor) -> list[int]:
    lengths = [end - start for start, end in pairwise(_on_host(cu_seq_lens)) if end > start]
    if not sum(lengths) == query.shape[2] == key.shape[2]:
        had, has = key.shape[2], sum(lengths)
        what = f"{type(module).__name__}: {had} keys, but the samples of the packed row have {has} tokens"
        raise ModelError(what, remedy="data.packing: false", code="attention.packing_unsupported")
    return lengths


def _on_host(cu_seq_lens: torch.Tensor) -> Sequence[int]:
    if cu_seq_lens.device.type == "cpu":
        return cu_seq_lens.tolist()
    from halftune_kernels.arguments import on_host  # waits for the device at most once a batch

    return on_host(cu_seq_lens)


def _in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scaling: float | None
) -> torch.Tensor:
    from halftune_kernels.ops.causal_segments import causal_segments  # for rows packed on a CPU

    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return causal_segments(query[0], key[0], value[0], lengths, scale)[None]


def _runs_in_blocks(query: torch.Tensor, value: torch.Tensor, lengths: list[int], dropout: float) -> bool:
    plain = dropout == 0.0 and query.shape[-1] == value.shape[-1]
    if not plain or query.device.type != "cpu" or max(lengths) > _LONGEST_IN_BLOCKS:
        return False
    mean_of_tokens = sum(length * length for length in lengths) / sum(lengths)
    return mean_of_tokens >= _MEAN_IN_BLOCKS


def _windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, settings: dict[str, Any]) -> torch.Tensor:
    """Attend in a window shorter than the sample, ``[1, H, L, D]``: a query block sees itself and the block before."""
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
    """Keys, values and ``enable_gqa``; heads are repeated if the kernel does not support grouped heads."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value, False
    # On CUDA only the flash kernel supports grouped heads: half precision, no mask, compute capability ≥ 8.0.
    half = key.dtype in (torch.float16, torch.bfloat16)
    if not key.is_cuda or (half and not masked and torch.cuda.get_device_capability(key.device) >= (8, 0)):
        return key, value, True
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), False


@constant(8)
def _block_mask(block: int, window: int, device: torch.device) -> torch.Tensor:
    """``[block, 2 · block]``, True if query i of a block sees key j of the previous block and its own."""
    distance = torch.arange(block, device=device)[:, None] + block - torch.arange(2 * block, device=device)
    return (distance >= 0) & (distance < window)


def band_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an additive mask ``[1, 1, ≥ length, ≥ length]``: 0 for visible keys, the dtype's minimum elsewhere.

    Causal, limited to the last ``window`` tokens unless None. Any top-left square is the mask of a shorter sample, so
    one mask serves all samples of a row.
    """
    return _band_mask(-(-length // 256) * 256, window, dtype, device)


@constant(4)
def _band_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < (window or length))
    mask = torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
    return mask[None, None]


def eager_of(module: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the eager attention function in the modeling file of ``module``'s class.

    Raises:
        ModelError: the file has none (it predates transformers' attention interface).
    """
    for cls in type(module).__mro__:
        found = vars(sys.modules[cls.__module__]).get("eager_attention_forward")
        if found is not None:
            return found
    raise ModelError(
        f"{type(module).__name__} has no eager_attention_forward",
        where=type(module).__module__,
        remedy="set attention: sdpa and data.packing: false",
        code="attention.packing_unsupported",
    )
