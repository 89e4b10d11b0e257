"""Finds the module in which the first non-finite number of a forward and backward pass appears, by hooks on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class NonFinite:
    """Where the first non-finite number appeared.

    Attributes:
        module: dotted name of the module.
        kind: class of the module.
        place: ``output``: it made the number from finite inputs. ``input``: the number was made on the way to it, by
            the code of the module around it. ``gradient``: it arrived at its output in the backward pass.
        number: ``NaN`` or ``infinity``.
        dtype: of the tensor, torch's name without ``torch.``.
        largest: largest finite magnitude in the tensor.
    """

    module: str
    kind: str
    place: str
    number: str
    dtype: str
    largest: float

    def describe(self) -> str:
        """The finding as a clause."""
        tensor = f"{self.dtype}, largest finite magnitude {self.largest:.3g}"
        around = self.module.rpartition(".")[0] or "the model"
        match self.place:
            case "output":
                return f"the first {self.number} came out of {self.module} ({self.kind}; {tensor})"
            case "input":
                return (
                    f"the first {self.number} was made in the code of {around}, on the way to {self.module} ({tensor})"
                )
            case _:
                place = f"a gradient at the output of {self.module}"
                return f"all outputs are finite; in the backward pass, the first {self.number} is in {place} ({tensor})"


class Watcher:
    """Collects the first finding of a forward and backward pass; ``finding`` is None while all is finite."""

    def __init__(self) -> None:
        self.finding: NonFinite | None = None

    def look(self, name: str, module: nn.Module, place: str, values: Any) -> None:
        """Notes the first non-finite tensor in ``values`` (tensors in tuples, lists and dicts)."""
        if self.finding is not None:
            return
        for tensor in _tensors(values):
            healthy = torch.isfinite(tensor.detach())
            if not bool(healthy.all()):
                number = "NaN" if bool(torch.isnan(tensor).any()) else "infinity"
                finite = tensor.detach()[healthy].abs()
                largest = float(finite.max()) if finite.numel() else 0.0
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.finding = NonFinite(name, type(module).__name__, place, number, dtype, largest)
                return


@contextmanager
def watch(model: nn.Module) -> Iterator[Watcher]:
    """Inside ``with``, every module's inputs, outputs and output gradients are looked at."""
    watcher, handles = Watcher(), []
    for name, module in model.named_modules():
        if name:
            handles += _hook(watcher, name, module)
    try:
        yield watcher
    finally:
        for handle in handles:
            handle.remove()


def _hook(watcher: Watcher, name: str, module: nn.Module) -> list[Any]:
    def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
        # attention masks hold -inf by design
        watcher.look(name, module, "input", [args, [v for key, v in kwargs.items() if "mask" not in key]])

    def after(_: nn.Module, args: tuple, output: Any) -> None:
        watcher.look(name, module, "output", output)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: watcher.look(name, module, "gradient", gradient))

    return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
