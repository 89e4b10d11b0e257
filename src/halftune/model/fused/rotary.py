"""Rotary embedding of queries and keys in one launch: on GPUs, a model's ``apply_rotary_pos_emb`` is rebound.

The function is a global of the modeling file, so that other models of that family get it, too; it was compared with the
file's own and calls that wherever the arguments are others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from halftune_kernels.library import opaque
from halftune_kernels.ops.rope import rope
from halftune_kernels.ops.rope.reference import FORMS

NAME = "apply_rotary_pos_emb"
_OWN = "_halftune_own"  # attribute of a rebound function
_TOLERANCE = 1e-5
_LENGTH, _WIDTH = 5, 16

Rotary = Callable[..., Any]


def rebind(model: nn.Module) -> Iterator[tuple[dict[str, Any], Rotary | None]]:
    """Rebind the functions of a model's modules.

    Yields:
        For each modeling file that has one: its globals, and the function before; None where it computes something
        else and was left. Files that are rebound already are left out.
    """
    files = {type(module).__module__ for module in model.modules()}
    for namespace in (vars(sys.modules[name]) for name in sorted(files) if name in sys.modules):
        own: Any = namespace.get(NAME)
        if not callable(own) or hasattr(own, _OWN):
            continue
        fused = _fused(own)
        if fused is not None:
            namespace[NAME] = fused
        yield namespace, None if fused is None else own


@torch.no_grad()
def _fused(own: Rotary) -> Rotary | None:
    """A function that computes what ``own`` does; None if there is none.

    Tables are random, so that only a form that reads the same columns agrees.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    given = normal(1, 3, _LENGTH, _WIDTH), normal(1, 2, _LENGTH, _WIDTH)
    whole = normal(1, _LENGTH, _WIDTH), normal(1, _LENGTH, _WIDTH)
    part = tuple(table[..., : _WIDTH // 2] for table in whole)
    try:
        promotes = own(*(x.bfloat16() for x in given), *whole)[0].dtype == torch.float32
        form = next((form for form in FORMS if _agree(own, form, given, whole)), None)
    except (TypeError, ValueError, RuntimeError, LookupError):
        return None
    if form is None:
        return None
    try:
        partial = _agree(own, form, given, part)
    except (TypeError, ValueError, RuntimeError):
        partial = False
    return _made(own, form, promotes, partial)


def _agree(own: Rotary, form: str, given: Any, tables: Any) -> bool:
    pairs = zip(own(*given, *tables), rope(*given, *tables, form=form, backend="torch"), strict=True)
    return all(x.shape == y.shape and (x - y).norm() <= _TOLERANCE * x.norm() for x, y in pairs)


def _made(own: Rotary, form: str, promotes: bool, partial: bool) -> Rotary:
    @functools.wraps(own)
    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        usual = not args and not kwargs and opaque(q) and q.ndim == 4 and cos.ndim == 3 and q.dtype == k.dtype
        if not usual or cos.requires_grad or cos.shape[1] != q.shape[2] or cos.shape[0] not in (1, q.shape[0]):
            return own(q, k, cos, sin, *args, **kwargs)
        if cos.shape[2] != q.shape[3] and not (partial and cos.shape[2] < q.shape[3]):
            return own(q, k, cos, sin)
        return rope(q, k, cos, sin, form=form, dtype=torch.promote_types(q.dtype, cos.dtype) if promotes else q.dtype)

    setattr(apply_rotary_pos_emb, _OWN, own)
    return apply_rotary_pos_emb
