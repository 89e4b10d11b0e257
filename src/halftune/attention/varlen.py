"""A plan's attention function for transformers' attention interface; samples of packed rows attend only to themselves.

``fn(module, query[B, H, T, D], key[B, G, S, D], value[B, G, S, D], attention_mask, dropout=, scaling=, **kwargs) ->
(out[B, T, H, D], weights or None)``. ``cu_seq_lens_q`` in ``kwargs`` (with ``max_length_q``, an int) marks a packed
row: B is 1, there is no mask, and each sample attends to itself alone.

Shapes: H query heads, G key/value heads (H a multiple of G), T tokens of the row, D head size. Every function is
differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from halftune.attention.backends import BACKENDS, backend_of
from halftune.attention.contract import AttentionPlan
from halftune.attention.segments import eager_of, segment_attention
from halftune.core.errors import ModelError
from halftune.core.table import named

if TYPE_CHECKING:
    from halftune.attention.flash import FlashAttention
    from halftune.attention.flex import FlexRows


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
    rows: FlashAttention | FlexRows | None = None if varlen == "segments" else flash
    if varlen == "block_mask":
        from halftune.attention.flex import FlexRows

        rows = FlexRows()
    packed = _packed_row(rows, by_model=row.name == "eager")
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


def _packed_row(rows: FlashAttention | FlexRows | None, *, by_model: bool) -> Callable[..., torch.Tensor]:
    """Attention of a packed row: one call of a kernel, or one for each sample.

    Args:
        rows: has the kernel; None for a call for each sample.
        by_model: whether samples are computed by the model's own function.
    """

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        cu_seq_lens, longest = settings["cu_seq_lens_q"], settings.get("max_length_q")
        for name in ROW:
            settings.pop(name, None)
        if rows is not None and longest is not None:
            return rows.row(module, query, key, value, cu_seq_lens, longest, **settings)
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
