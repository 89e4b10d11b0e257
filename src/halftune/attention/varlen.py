"""A plan's attention function for transformers' attention interface; samples of packed rows attend only to themselves.

``fn(module, query[B, H, T, D], key[B, G, S, D], value[B, G, S, D], attention_mask, dropout=, scaling=, **kwargs) ->
(out[B, T, H, D], weights or None)``. ``cu_seq_lens_q`` in ``kwargs`` (with ``max_length_q``, an int) marks a packed
row: B is 1, there is no mask, and each sample attends to itself alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from halftune.attention.backends import BACKENDS, backend_of
from halftune.attention.flash import FlashAttention
from halftune.attention.plan import AttentionPlan
from halftune.attention.segments import eager_of, segment_attention
from halftune.core.errors import ModelError
from halftune.core.table import named

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_ROW = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
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
        flash = FlashAttention(named(kernel)())
    batch: Attention = flash.batch if row.kernel and flash is not None else named(row.attend)
    by_model = row.name == "eager"

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
        cu_seq_lens = kwargs.get("cu_seq_lens_q")
        if cu_seq_lens is None:
            return batch(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        settings: dict[str, Any] = {"dropout": dropout, "scaling": scaling, **kwargs}
        longest = kwargs.get("max_length_q")
        for name in _ROW:
            settings.pop(name, None)
        if flash is not None and varlen != "segments" and longest is not None:
            return flash.row(module, query, key, value, cu_seq_lens, int(longest), **settings), None
        causal = settings.pop("is_causal", None)
        settings["is_causal"] = getattr(module, "is_causal", True) if causal is None else causal
        # only the model's own function supports these
        own = by_model or any(kwargs.get(name) is not None for name in ("softcap", "s_aux"))
        return segment_attention(module, query, key, value, cu_seq_lens, eager=own, **settings), None

    return attend


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
