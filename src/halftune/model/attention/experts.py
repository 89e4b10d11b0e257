"""Keeps grouped experts in the compute dtype: autocast has no rule for ``grouped_mm``.

It would compute in fp32 at several times the cost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from halftune.core.log import get_logger
from halftune.plan import Plan

log = get_logger(__name__)

NAME, GROUPED, LOOP = "halftune_grouped_mm", "grouped_mm", "eager"


def route_experts(model: nn.Module, plan: Plan) -> int:
    """Make grouped experts compute in autocast's dtype; returns the number of such layers.

    Does nothing without autocast. A loop over experts consists of linear layers, which autocast casts; other values of
    ``experts_implementation`` in config.json are overridden. Registers one entry in transformers' table of experts.
    """
    if not plan.precision.autocast.value:
        return 0
    experts: list[Any] = [module for module in model.modules() if "_is_expert_parallel" in vars(module)]
    grouped = [module for module in experts if module.config._experts_implementation not in (NAME, LOOP)]
    if grouped:
        ALL_EXPERTS_FUNCTIONS.register(NAME, in_autocast)
        for module in grouped:
            module.config._experts_implementation = NAME
    if experts:
        how, dtype = GROUPED if grouped else "a loop", plan.precision.compute.value
        log.info("experts of %d layers use %s in %s", len(experts), how, dtype)
    return len(grouped)


def in_autocast(
    module: nn.Module, hidden_NC: torch.Tensor, chosen_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """``grouped_mm`` with operands in autocast's dtype; the result has the dtype of ``hidden_NC``.

    Args:
        module: experts of one layer.
        hidden_NC: ``[N, C]`` tokens.
        chosen_NK: ``[N, K]`` expert indices of each token.
        weights_NK: ``[N, K]`` expert weights; the sum over experts has their dtype.
    """
    compute = ALL_EXPERTS_FUNCTIONS[GROUPED]
    kind = hidden_NC.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return compute(module, hidden_NC, chosen_NK, weights_NK)
    dtype = torch.get_autocast_dtype(kind)
    return compute(_Cast(module, dtype), hidden_NC.to(dtype), chosen_NK, weights_NK).to(hidden_NC.dtype)


class _Cast:
    """A view of a module with its floating parameters cast to another dtype; gradients reach the parameters."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
