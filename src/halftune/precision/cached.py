"""The guard in front of attention that writes into caches it is given: what arrives is brought to them, never they."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from halftune.precision.guard import Guard, returned

OPERANDS = ("q", "k", "v", "rotary_cos", "rotary_sin")
"""Of ``flash_attn_with_kvcache``: what must have the caches' dtype; all but q may be None or left out."""
_CACHES = ("k_cache", "v_cache")
_TAKEN = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def guard_cached(guard: Guard, function: Callable[..., Any]) -> Callable[..., Any]:
    """``flash_attn_with_kvcache`` (flash-attn 2 or 3) behind a guard, with its own signature.

    Raises, when called:
        DtypeContractError: caches in fp32 or of two formats, since what is written to a cast's copy would be lost; in
            ``strict``, any cast needed.
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
        if dtype is not caches["v_cache"].dtype or dtype not in _TAKEN:
            guard.refuse_caches(function, caches | operands)
        if all(operand.dtype is dtype for operand in operands.values()):
            return function(*args, **kwargs)
        guard.note_cast(function, operands, dtype)
        brought = {name: operand.to(dtype) for name, operand in operands.items()}
        args_list = [brought.get(name, value) for name, value in zip(names, args, strict=False)]
        kwargs |= {name: operand for name, operand in brought.items() if name in kwargs}
        return returned(function(*args_list, **kwargs), list(operands.values()), dtype)

    return guarded
