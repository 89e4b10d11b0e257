"""What ``all-linear`` means beyond peft's own rule: no routers, and nothing that peft itself refuses."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from halftune.config.facts.model import EXPERTS
from halftune.core.log import get_logger

log = get_logger(__name__)

# Fused kernels of these families read the weights past the modules, so that an adapter there would have no effect.
# With our operators it would have: the fused kernels are never called. But peft refuses such an adapter, whoever runs
# it, and a saved one could be loaded by nobody.
_MAMBA = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})
_READ_PAST = frozenset({"out_proj", "conv1d"})


def without_routers(model: PreTrainedModel) -> str | list[str]:
    """``all-linear``, or the full names of the linear layers where some of them must be left out.

    Routers of mixtures of experts stay frozen: some are linear layers that return more than a tensor, and another
    choice of experts is no small update.
    """
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    routers = {name for name, module in linear.items() if _is_router(name, module, _experts(model))}
    kind = model.config.model_type
    refused = {name for name in linear if kind in _MAMBA and name.rpartition(".")[2] in _READ_PAST}
    for left_out, why in (
        (routers, "routers stay frozen"),
        (refused, f"peft refuses adapters there, for the fused kernels of {kind} read past them"),
    ):
        if left_out:
            leaves = sorted({name.rpartition(".")[2] for name in left_out})
            log.info("all-linear leaves out %d layers (%s): %s", len(left_out), ", ".join(leaves), why)
    if not routers and not refused:
        return "all-linear"
    return [name for name in linear if name not in routers and name not in refused]


def _experts(model: PreTrainedModel) -> set[int]:
    config = model.config.get_text_config(decoder=True).to_dict()
    return {config[key] for key in EXPERTS if isinstance(config.get(key), int)}


def _is_router(name: str, module: nn.Module, experts: set[int]) -> bool:
    *_, leaf = parts = name.split(".")
    if "router" in parts or type(module).__name__.endswith("Router"):
        return True
    return leaf == "gate" and isinstance(module, nn.Linear) and module.out_features in experts
