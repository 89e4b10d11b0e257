"""A plan's attention function for transformers' attention interface; samples of packed rows attend only to themselves.

``fn(module, query[B, H, T, D], key[B, G, S, D], value[B, G, S, D], attention_mask, dropout=, scaling=, **kwargs) ->
(out[B, T, H, D], weights or None)``. ``cu_seq_lens_q`` in ``kwargs`` (with ``max_length_q``, an int) marks a packed
row: B is 1, there is no mask, and each sample attends to itself alone.

CPUs and GPUs without varlen kernels compute a packed row sample by sample, without a dense mask. Shapes: H query heads,
G key/value heads (H a multiple of G), T tokens of the row, L tokens of one sample, D head size. Every function is
differentiable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from halftune.attention.backends import BACKENDS, backend_of
from halftune.attention.contract import AttentionPlan
from halftune.core.errors import ModelError
from halftune.core.table import named
from halftune_kernels.constants import constant

if TYPE_CHECKING:
    from halftune.attention.flash import FlashAttention


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


Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
ROW = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_KERNELS = {row.varlen: row.kernel for row in BACKENDS if row.kernel}


def attention_callable(plan: AttentionPlan, flash: FlashAttention | None = None) -> Attention:
    """Return the attention function for the plan's backend, provider and varlen method.

    Args:
        plan: the run's attention plan.
        flash: used instead of the plan's kernels, which require a CUDA device.

    Raises:
        MissingPackageError: the plan names a package that is not installed.
    """
    row, varlen = backend_of(plan.softmax.value, plan.provider.value), plan.varlen.value
    if flash is None and (kernel := _KERNELS.get(varlen) or row.kernel):
        from halftune.attention.flash import FlashAttention

        flash = FlashAttention(named(kernel)())
    batch: Attention = flash.batch if row.kernel and flash is not None else named(row.attend)
    packed = _packed_row(None if varlen == "segments" else flash, by_model=row.name == "eager")
    if varlen == "segments":
        import halftune.attention.segments_op  # noqa: F401  registers the operator of `in_graph`

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if kwargs.get("cu_seq_lens_q") is None:
            return batch(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        return packed(module, query, key, value, dropout=dropout, scaling=scaling, **kwargs), None

    return attend


def _packed_row(flash: FlashAttention | None, *, by_model: bool) -> Callable[..., torch.Tensor]:
    """Attention of a packed row: one call of a varlen kernel, or one for each sample.

    Args:
        flash: has the kernel; None for a call for each sample.
        by_model: whether samples are computed by the model's own function.
    """

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        cu_seq_lens, longest = settings["cu_seq_lens_q"], settings.get("max_length_q")
        for name in ROW:
            settings.pop(name, None)
        if flash is not None and longest is not None:
            return flash.row(module, query, key, value, cu_seq_lens, longest, **settings)
        causal = settings.pop("is_causal", None)
        settings["is_causal"] = getattr(module, "is_causal", True) if causal is None else causal
        # only the model's own function supports these
        own = by_model or any(settings.get(name) is not None for name in ("softcap", "s_aux"))
        if torch.compiler.is_compiling() and not own and not settings["dropout"]:
            return in_graph(query, key, value, cu_seq_lens, settings)
        return segment_attention(module, query, key, value, cu_seq_lens, eager=own, **settings)

    return attend


def in_graph(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_lens: torch.Tensor, settings: dict[str, Any]
) -> torch.Tensor:
    """:func:`segment_attention` as one node of a graph; the operator is registered by :func:`attention_callable`."""
    options = (settings["scaling"], settings["is_causal"], settings.get("sliding_window"))
    return torch.ops.halftune.segment_attention(query, key, value, cu_seq_lens, *options)


def sdpa(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call torch's scaled_dot_product_attention with the interface's signature.

    Raises:
        ModelError: the model has soft-capping or attention sinks.
    """
    for name, feature in (("softcap", "logit soft-capping"), ("s_aux", "attention sinks")):
        if kwargs.get(name) is not None:
            what = f"{type(module).__name__} uses {feature}, which sdpa does not support"
            raise ModelError(what, remedy="set attention: eager", code="attention.kernel_lacks_feature")
    forward: Attention = sdpa_attention_forward
    return forward(module, *args, **kwargs)


def eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the model's eager function with the interface's signature."""
    return eager_of(module)(module, *args, **kwargs)
