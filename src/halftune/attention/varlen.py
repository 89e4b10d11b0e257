"""A plan's attention callable, in the signature of transformers' attention interface; packed rows never mix samples.

``fn(module, query[B, H, T, D], key[B, G, S, D], value[B, G, S, D], attention_mask, dropout=, scaling=, **kwargs) ->
(out[B, T, H, D], weights or None)``. A packed row announces itself by ``cu_seq_lens_q`` in ``kwargs`` (with
``max_length_q``, an int): B is 1, there is no mask, and each sample attends to itself alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from halftune.attention.flash import FlashAttention, flash_attn_varlen, torch_varlen, transformers_flash
from halftune.attention.plan import AttentionPlan
from halftune.attention.segments import eager_of, segment_attention
from halftune.core.errors import ModelError

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_ROW = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_FLASH = {"flash_attn": flash_attn_varlen, "torch": torch_varlen}


def attention_callable(plan: AttentionPlan, flash: FlashAttention | None = None) -> Attention:
    """What the plan's softmax backend, provider and path of packed rows come to.

    Args:
        plan: the routes of the run.
        flash: stands in for the kernels that the plan names, which need a CUDA device.

    Raises:
        MissingPackageError: the plan names a package that is not installed.
    """
    backend, varlen = plan.softmax.value, plan.varlen.value
    if flash is None and (backend == "fa2" or varlen in ("flash_attn_varlen", "torch_varlen")):
        provider = "torch" if "torch" in (plan.provider.value, varlen.removesuffix("_varlen")) else "flash_attn"
        flash = FlashAttention(_FLASH[provider]())
    batch = _batch_callable(backend, flash)

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
        # What only the model's own function knows how to do.
        eager = backend == "eager" or any(kwargs.get(name) is not None for name in ("softcap", "s_aux"))
        return segment_attention(module, query, key, value, cu_seq_lens, eager=eager, **settings), None

    return attend


def _batch_callable(backend: str, flash: FlashAttention | None) -> Attention:
    """The backend for batches that are not packed rows."""
    if backend == "fa2":
        assert flash is not None
        return flash.batch
    if backend in ("fa3", "fa4"):
        return transformers_flash(f"flash_attention_{backend[-1]}")
    return {"sdpa": _sdpa, "flex": flex_attention_forward, "eager": _eager}[backend]


def _sdpa(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    for name, wish in (("softcap", "logit soft-capping"), ("s_aux", "attention sinks")):
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} has {wish}, which sdpa lacks", remedy="attention: eager")
    forward: Attention = sdpa_attention_forward
    return forward(module, *args, **kwargs)


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return eager_of(module)(module, *args, **kwargs)
