"""The guard of ``flash_attn_with_kvcache``: casts operands to the dtype of the caches, which are written in place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from halftune.precision.guard import Guard, returned

OPERANDS = ("q", "k", "v", "rotary_cos", "rotary_sin")
"""Parameters of ``flash_attn_with_kvcache`` that must have the caches' dtype; all but q are optional."""
_CACHES = ("k_cache", "v_cache")
_SUPPORTED = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def guard_cached(guard: Guard, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``flash_attn_with_kvcache`` (flash-attn 2 or 3) with a guard; the signature does not change.

    Raises, when called:
        DtypeContractError: the caches are fp32 or have different dtypes (writes to a cast copy would be lost); in
            ``strict`` mode, a cast is needed.
    """
    if guard.mode == "off":
        return function
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        operands = {name: given[name] for name in OPERANDS if isinstance(given.get(name), torch.Tensor)}
        caches = {name: given[name] for name in _CACHES}
        dtype = caches["k_cache"].dtype
        if dtype is not caches["v_cache"].dtype or dtype not in _SUPPORTED:
            guard.refuse_caches(function, caches | operands)
        if all(operand.dtype is dtype for operand in operands.values()):
            return function(*args, **kwargs)
        guard.note_cast(function, operands, dtype)
        cast = {name: operand.to(dtype) for name, operand in operands.items()}
        args_list = [cast.get(name, value) for name, value in zip(names, args, strict=False)]
        kwargs |= {name: operand for name, operand in cast.items() if name in kwargs}
        return returned(function(*args_list, **kwargs), list(operands.values()), dtype)

    return guarded
