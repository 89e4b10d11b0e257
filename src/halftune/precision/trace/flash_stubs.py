"""Stubs of flash_attn's functions and torch's flex attention with correct shapes, importable without the package.

For fake tensors: the functions ignore masks and sample boundaries, since a trace only compares dtypes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxOutput


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``[B, T, H, D]`` and ``[B, S, G, D]`` twice → ``[B, T, H, D]``."""
    return _attend(q, k, v)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """``[N, H, D]`` and ``[M, G, D]`` twice → ``[N, H, D]``."""
    return _attend(q[None], k[None], v[None])[0]


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``kv`` ``[B, S, 2, G, D]``."""
    return _attend(q, *kv.unbind(2))


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``qkv`` ``[B, T, 3, H, D]``."""
    return _attend(*qkv.unbind(2))


def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``kv`` ``[M, 2, G, D]``."""
    return _attend(q[None], *kv[None].unbind(2))[0]


def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``qkv`` ``[N, 3, H, D]``."""
    return _attend(*qkv[None].unbind(2))[0]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Return a tensor like ``q``; the caches are not updated."""
    return q * 1.0


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """``[B, H, T, D]``, ``[B, G, S, D]``, ``[B, G, S, E]`` → ``[B, H, T, E]``, or a tuple that begins with it."""
    out = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa)
    lse = out.detach()[..., 0].float()
    if return_aux is not None:
        return out, AuxOutput(lse=lse, max_scores=lse)
    return (out, lse) if return_lse else out


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a tensor like ``x``."""
    return x * 1.0


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """``flash_attn.bert_padding``: rows of ``x``."""
    return x[indices]


def unpad_input(hidden: torch.Tensor, mask: torch.Tensor, *args: Any) -> tuple[Any, ...]:
    """``flash_attn.bert_padding``: ``[B, T, …]`` → tokens, indices, cumulative lengths, longest length, lengths."""
    counts = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    cu = nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden.flatten(0, 1)[indices], indices, cu, int(counts.max()), counts


def pad_input(hidden: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """``flash_attn.bert_padding``: inverse of ``unpad_input``."""
    whole = hidden.new_zeros(batch * seqlen, *hidden.shape[1:])
    return whole.index_copy(0, indices, hidden).unflatten(0, (batch, seqlen))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    queries, keys, values = (operand.transpose(1, 2) for operand in (q, k, v))
    return nn.functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True).transpose(1, 2)


_ATTENTION = tuple(name for name in list(globals()) if name.startswith("flash_attn_"))
_PADDING = ("index_first_axis", "unpad_input", "pad_input")
STUBS = {name: globals()[name] for name in (*_ATTENTION, *_PADDING, "apply_rotary_emb", "flex_attention")}
"""The stubs by name; not affected when the trace replaces the module's attributes."""
_MODULES: dict[str, tuple[str, ...]] = {
    "flash_attn": _ATTENTION,
    "flash_attn.flash_attn_interface": _ATTENTION,
    "flash_attn.bert_padding": _PADDING,
    "flash_attn.layers": (),
    "flash_attn.layers.rotary": ("apply_rotary_emb",),
    "flash_attn_interface": _ATTENTION,
}


@contextmanager
def flash_attn_importable() -> Iterator[bool]:
    """Inside, ``flash_attn`` and flash-attn 3 can be imported; yields whether ``flash_attn`` is the real package."""
    absent = [package for package in ("flash_attn", "flash_attn_interface") if not _there(package)]
    stubs = {name: module for name, module in _modules().items() if name.partition(".")[0] in absent}
    sys.modules.update(stubs)
    try:
        yield "flash_attn" not in absent
    finally:
        for name in stubs:
            sys.modules.pop(name, None)


def _there(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


@cache
def _modules() -> dict[str, ModuleType]:
    """The stub modules, created once: a model traced earlier keeps its imports."""
    stubs: dict[str, ModuleType] = {}
    for name, functions in _MODULES.items():
        stubs[name] = module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update({function: STUBS[function] for function in functions})
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(stubs[parent], child, module)
    vars(stubs["flash_attn"])["__version__"] = "2.8.3"
    return stubs
