"""Resolves ``all-linear`` in a model: excludes routers, layers that peft refuses, and modules trained in full.

The plan counts the same targets from names and shapes (``plan.weights.targets``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from halftune.config.facts.families import family_of
from halftune.config.facts.sizes import EXPERTS
from halftune.core.log import get_logger
from halftune.plan.weights.targets import saved_around

log = get_logger(__name__)


def without_routers(model: PreTrainedModel, saved: Sequence[str] = ()) -> str | list[str]:
    """``all-linear``, or the full names of the linear layers if some must be excluded.

    Routers of mixture-of-experts models stay frozen: some return more than a tensor, and changing the choice of experts
    is not a small update. ``saved``: the modules that are trained in full.
    """
    linear, routers, refused = linear_layers(model)
    kind = model.config.model_type
    for left_out, why in (
        (routers, "routers stay frozen"),
        (refused, f"fused kernels or the code of {kind} read their weights directly"),
    ):
        if left_out:
            leaves = sorted({name.rpartition(".")[2] for name in left_out})
            log.info("all-linear excludes %d layers (%s): %s", len(left_out), ", ".join(leaves), why)
    names = [name for name in linear if name not in {*routers, *refused} and not saved_around(name, saved)]
    return names if len(names) < len(linear) else "all-linear"


def linear_layers(model: PreTrainedModel) -> tuple[list[str], set[str], set[str]]:
    """Names of a model's linear layers except its head, of the routers among them, and of layers that peft refuses."""
    head = model.get_output_embeddings() or getattr(model, "score", None)  # pyright: ignore[reportCallIssue]
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    config = model.config.get_text_config(decoder=True).to_dict()
    experts = {config[key] for key in EXPERTS if isinstance(config.get(key), int)}
    routers = {name for name, module in linear.items() if _is_router(name, module, experts)}
    # Our operators would apply an adapter there, since they never call the fused kernels. But peft refuses it, so a
    # saved adapter could not be loaded.
    past = family_of(model.config.model_type).lora_exclude
    refused = {name for name in linear if name.rpartition(".")[2] in past}
    return list(linear), routers, refused


def _is_router(name: str, module: nn.Module, experts: set[int]) -> bool:
    *_, leaf = parts = name.split(".")
    if "router" in parts or type(module).__name__.endswith("Router"):
        return True
    return leaf == "gate" and isinstance(module, nn.Linear) and module.out_features in experts
