"""Quantises fused experts on load, which bitsandbytes' linear layers cannot hold: they are 3-D parameters.

The packed weights stay in memory. They are dequantised when a layer's experts compute, and freed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bitsandbytes import functional
from torch import nn
from torch.nn.utils import parametrize
from transformers import core_model_loading

from halftune.plan.weights.experts import is_expert

_BLOCK = 64  # weights with a common scale
_RANGE = 127.0  # of int8, by the largest absolute value of a row


class Nf4Weight(nn.Module):
    """Dequantises blocks of 64 NF4 values (Dettmers et al. 2023, arXiv:2305.14314), whose scales are quantised too.

    Attributes:
        state: scales and dtype of the weight; moves with the module.
        shape: of the weight.
    """

    def __init__(self, state: functional.QuantState, shape: torch.Size) -> None:
        super().__init__()
        self.state, self.shape = state, shape

    @torch.no_grad()
    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the weight ``[experts, …, …]`` in its first dtype, of ``packed`` uint8."""
        return functional.dequantize_4bit(packed, self.state).reshape(self.shape)

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Nf4Weight:
        self.state.to(_device(fn, self.state.absmax))
        return super()._apply(fn, recurse)


class Int8Weight(nn.Module):
    """Multiplies int8 rows by their scales (Dettmers et al. 2022, arXiv:2208.07339).

    Attributes:
        scales: ``[experts, …, 1]`` fp32: a row's largest absolute value / 127.
        dtype: of the weight.
    """

    def __init__(self, scales: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.scales, self.dtype = scales, dtype  # transformers would initialise a buffer again

    @torch.no_grad()
    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the weight ``[experts, …, …]`` of ``packed`` int8."""
        return (packed * self.scales).to(self.dtype)

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Int8Weight:
        self.scales = self.scales.to(_device(fn, self.scales))
        return super()._apply(fn, recurse)


def _device(fn: Callable[..., torch.Tensor], like: torch.Tensor) -> torch.device:
    """Where ``fn`` moves tensors."""
    return fn(torch.empty(0, dtype=torch.uint8, device=like.device)).device


def _packed(weight: torch.Tensor, method: str) -> tuple[torch.Tensor, nn.Module]:
    if method in ("nf4", "nf4_single"):
        # as rows of one block: on a CPU, bitsandbytes cannot dequantise shorter rows
        rows = weight.reshape(-1, _BLOCK) if weight.numel() % _BLOCK == 0 else weight.reshape(1, -1)
        nested = method == "nf4"
        data, state = functional.quantize_4bit(rows, blocksize=_BLOCK, compress_statistics=nested, quant_type="nf4")
        return data, Nf4Weight(state, weight.shape)
    wide = weight.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / _RANGE
    return (wide / scales).round().to(torch.int8), Int8Weight(scales, weight.dtype)


def quantise_parameter(module: nn.Module, name: str, method: str) -> None:
    """Replace a parameter by its quantised form, which is dequantised when it is read.

    Args:
        module: holds the parameter.
        name: of the parameter.
        method: ``nf4``, ``nf4_single`` or ``int8``.
    """
    data, dequantised = _packed(getattr(module, name).detach(), method)
    setattr(module, name, nn.Parameter(data, requires_grad=False))
    parametrize.register_parametrization(module, name, dequantised, unsafe=True)
    if "forward" not in vars(module):
        module.forward = _cached(module.forward)


def _cached(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A loop over experts reads each weight many times."""

    def once(*args: Any, **kwargs: Any) -> Any:
        with parametrize.cached():
            return forward(*args, **kwargs)

    return once


@contextmanager
def quantised_experts(method: str) -> Iterator[None]:
    """Inside, ``from_pretrained`` quantises each expert weight as soon as it has read it.

    Args:
        method: ``nf4``, ``nf4_single`` or ``int8``.
    """
    original = core_model_loading.set_param_for_module

    def set_and_quantise(model: Any, target: str, value: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        original(model, target, value, *args, **kwargs)
        if is_expert(target, value.ndim):
            place, _, name = target.rpartition(".")
            quantise_parameter(model.get_submodule(place), name, method)

    core_model_loading.set_param_for_module = set_and_quantise
    try:
        yield
    finally:
        core_model_loading.set_param_for_module = original


def dequantise(model: nn.Module) -> None:
    """Replace quantised experts by plain fp32 parameters with the values used in training."""
    for module in list(model.modules()):
        # gate and up before down, as in models' code: peft nests its adapters in this order
        for name in sorted(getattr(module, "parametrizations", ()), reverse=True):
            value = getattr(module, name).detach().float()
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            setattr(module, name, nn.Parameter(value, requires_grad=False))
