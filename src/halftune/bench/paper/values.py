"""Values of small integer tensors among fake ones: boundaries, positions, masks and flags.

A fake tensor has no data. Where model code asks for some, on a GPU it would wait for the device; here it gets what the
same operations give on the CPU. A tensor whose values are unknown reads as ones, so that losses and norms are finite
and flags are set.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

_MOST, _MOST_FLOATING = 1 << 22, 16  # elements whose values are followed
_SKIPPED = ("aten::_foreach", "aten::_fused", "aten::_amp", "aten::rand", "aten::bernoulli", "aten::empty")


class Values:
    """Follows values through operators."""

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A CPU tensor with the values, or None."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        return tensor.constant if tensor.constant is not None else self._known.get(tensor)

    def or_ones(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values; ones where they are unknown."""
        known = self.of(tensor)
        with unset_fake_temporarily():
            return torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known

    def set(self, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Record values of a fake tensor; returns it."""
        if isinstance(tensor, FakeTensor):
            self._known[tensor] = values
        return tensor

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an operator returns on the CPU for the operands' values."""
        real_args, real_kwargs = pytree.tree_map(self._real, (args, kwargs))
        if real_kwargs.get("device") is not None:
            real_kwargs = {**real_kwargs, "device": torch.device("cpu")}
        with unset_fake_temporarily(), torch.no_grad():
            return func(*real_args, **real_kwargs)

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Record the values of an operator's results, where they are small and can be known."""
        if func._schema.name.startswith(_SKIPPED) or not self._can_know(_tensors((args, kwargs)), _tensors(out)):
            return
        try:
            results = self.compute(func, args, kwargs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
            return
        for fake, real in zip(_tensors(out), _tensors(results), strict=False):
            self.set(fake, real)

    def _can_know(self, operands: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
        """Whether results are small, and known: integers also where operands read as ones."""
        fake = [one for one in results if isinstance(one, FakeTensor)]
        unknown = [one for one in operands if self.of(one) is None]
        if not fake or not all(map(_small, fake)) or any(one.numel() > _MOST for one in unknown):
            return False
        return not unknown or not any(map(_is_floating, fake))

    def _real(self, leaf: Any) -> Any:
        return self.or_ones(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (_MOST_FLOATING if _is_floating(tensor) else _MOST)
