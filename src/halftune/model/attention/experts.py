"""Keeps grouped experts in the compute dtype: autocast has no rule for ``grouped_mm``.

It would compute in fp32 at several times the cost. LoRA on experts is multiplied here, too, beside their weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear

from halftune.core.log import get_logger
from halftune.plan import Plan

log = get_logger(__name__)

NAME, GROUPED, LOOP = "halftune_grouped_mm", "grouped_mm", "eager"
_ALIGNED = 16  # bytes of which grouped_mm wants a row's length to be a multiple on CUDA devices


class LowRank(NamedTuple):
    """LoRA on one weight of E experts.

    Attributes:
        a_ERI: ``[E, rank, in]``.
        b_ERO: ``[E, rank, out]``, multiplied by LoRA's scaling: a factor of the output would be rounded in backward.
    """

    a_ERI: torch.Tensor
    b_ERO: torch.Tensor


def is_grouped(module: nn.Module) -> bool:
    """Whether a module is a layer's experts, which transformers multiplies by a function of its table."""
    return "_is_expert_parallel" in vars(module)


def grouped_experts(model: nn.Module) -> list[Any]:
    """All modules that ``is_grouped`` means."""
    return [module for module in model.modules() if is_grouped(module)]


def route_experts(model: nn.Module, plan: Plan) -> int:
    """Make grouped experts compute in autocast's dtype; returns the number of such layers.

    Does nothing without autocast. A loop over experts consists of linear layers, which autocast casts; other values of
    ``experts_implementation`` in config.json are overridden.
    """
    if not plan.precision.autocast.value:
        return 0
    experts = grouped_experts(model)
    routed = route(experts)
    if experts:
        how, dtype = GROUPED if routed else "a loop", plan.precision.compute.value
        log.info("experts of %d layers use %s in %s", len(experts), how, dtype)
    return len(routed)


def route(experts: list[Any]) -> list[Any]:
    """Let experts compute by ``grouped``, which registers it in transformers' table; returns those that are no loops.

    Their attribute ``low_rank`` maps names of parameters to active ``LowRank`` updates.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, grouped)
    for module in experts:
        module.low_rank = {}
        if module.config._experts_implementation != LOOP:
            module.config._experts_implementation = NAME
    return [module for module in experts if is_routed(module)]


def is_routed(module: Any) -> bool:
    """Whether ``grouped`` computes the experts of a layer."""
    return module.config._experts_implementation == NAME and not module._is_expert_parallel


def grouped(module: Any, hidden_NC: torch.Tensor, chosen_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
    """``grouped_mm`` with operands in autocast's dtype, if any; the result has the dtype of ``hidden_NC``.

    Args:
        module: experts of one layer.
        hidden_NC: ``[N, C]`` tokens.
        chosen_NK: ``[N, K]`` expert indices of each token.
        weights_NK: ``[N, K]`` expert weights; the sum over experts has their dtype.
    """
    compute = beside_weights if module.low_rank else ALL_EXPERTS_FUNCTIONS[GROUPED]
    kind = hidden_NC.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return compute(module, hidden_NC, chosen_NK, weights_NK)
    dtype = torch.get_autocast_dtype(kind)
    return compute(_Cast(module, dtype), hidden_NC.to(dtype), chosen_NK, weights_NK).to(hidden_NC.dtype)


def beside_weights(
    module: Any, hidden_NC: torch.Tensor, chosen_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """transformers' ``grouped_mm_experts_forward`` with LoRA: ``x W + (x Aᵀ) B``, the sum of the weights never made.

    Dtypes and arguments are those of ``grouped``; S = N·K rows are sorted by expert.
    """
    chosen_S, order_S = chosen_NK.reshape(-1).sort()
    every_E = torch.arange(module.num_experts, device=chosen_S.device)
    offsets_E = torch.searchsorted(chosen_S, every_E, right=True, out_int32=True)

    def linear(x_SI: torch.Tensor, name: str) -> torch.Tensor:
        weight, update = getattr(module, name), module.low_rank.get(name)
        bias = getattr(module, f"{name}_bias")[chosen_S] if module.has_bias else None
        out_SO = _grouped_linear(x_SI, weight, offsets_E, bias, module.is_transposed)
        if update is None:
            return out_SO
        a_ERI, b_ERO = (_aligned(factor, weight.dtype) for factor in update)
        inner_SR = _grouped_linear(x_SI, a_ERI, offsets_E)
        return out_SO.add_(_grouped_linear(inner_SR, b_ERO, offsets_E, is_transposed=True))

    inner_SI = linear(hidden_NC[order_S // chosen_NK.size(-1)], "gate_up_proj" if module.has_gate else "up_proj")
    inner_SI = module._apply_gate(inner_SI) if module.has_gate else module.act_fn(inner_SI)
    out_SC = linear(inner_SI, "down_proj")
    if module.has_post_expert_norm:
        out_SC = module.post_expert_norm(out_SC)
    out_SC = out_SC * weights_NK.reshape(-1)[order_S, None]
    back_S = torch.empty_like(order_S)
    back_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    # a sum in order: index_add_ adds in any order on CUDA
    return out_SC[back_S].view(*chosen_NK.shape, -1).sum(dim=1).to(hidden_NC.dtype)


def _aligned(factor_ERI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A factor in a weight's dtype, its rank padded with zeros to what ``grouped_mm`` can multiply."""
    short = -factor_ERI.shape[1] % (_ALIGNED // dtype.itemsize)
    factor_ERI = factor_ERI.to(dtype).contiguous()
    return functional.pad(factor_ERI, (0, 0, 0, short)) if short else factor_ERI


class _Cast:
    """A view of a module with its floating parameters cast to another dtype; gradients reach the parameters."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
