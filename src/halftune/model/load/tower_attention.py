"""Puts the plan's attention, behind the plan's guard, in front of the attention of towers that a run uses.

Towers that keep images or sounds apart by their own ``cu_seqlens`` call a FlashAttention plan's varlen kernel once per
layer. Others compute by sdpa, or by their own eager function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from halftune.attention.backends import Backend, backend_of
from halftune.attention.varlen import ROW, attention_callable
from halftune.config.facts.media import TOWERS_WITH_BOUNDS
from halftune.core.choice import Choice
from halftune.core.log import get_logger
from halftune.core.table import named
from halftune.model.attention.register import OWN, current_guard
from halftune.model.load.towers import towers_of
from halftune.plan import Plan
from halftune.precision.rebind import as_installed

log = get_logger(__name__)


def guard_towers(model: PreTrainedModel, plan: Plan, registered: str) -> None:
    """Register the attention of a model's towers and make the towers call it.

    A tower's config gets a name with ``flash`` for FlashAttention: this is how transformers' code knows that it may
    pass ``cu_seqlens``.

    Args:
        model: as loaded, with its towers; its own attention is registered.
        plan: gives the backend.
        registered: name of the model's own attention.
    """
    towers = towers_of(model)
    if towers is None or registered == OWN:
        return
    for name in towers.names:
        tower = dict(model.named_modules()).get(name)
        if tower is None:
            continue
        tower.register_forward_pre_hook(_without_row, with_kwargs=True)
        for part in _with_attention(tower):
            backend = _backend(part, plan, bounds=model.config.model_type in TOWERS_WITH_BOUNDS)
            part.config._attn_implementation = _register(registered, backend, plan)
            log.info("attention of %s: %s, behind the dtype guard", name, backend.name)


def _with_attention(tower: nn.Module) -> Iterator[Any]:
    """The models in a tower whose configs say how they attend."""
    for part in tower.modules():
        if isinstance(part, PreTrainedModel):
            yield part


def _backend(part: Any, plan: Plan, *, bounds: bool) -> Backend:
    """The plan's for towers that pass boundaries, if it has their head size; else sdpa or eager."""
    attention = plan.attention
    planned = backend_of(attention.softmax.value, attention.provider.value)
    size = _head_size(part.config)
    if planned.kernel and bounds and size <= planned.max_head_dim and not size % planned.head_dim_multiple:
        return planned
    plain = planned.name == "eager" or not getattr(part, "_supports_sdpa", False)
    return backend_of(*(("eager", "transformers") if plain else ("sdpa", "torch")))


def _head_size(config: Any) -> int:
    width = getattr(config, "d_model", None) or config.hidden_size
    names = ("num_heads", "num_attention_heads", "encoder_attention_heads")
    heads = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    return getattr(config, "head_dim", None) or width // heads


def _register(registered: str, backend: Backend, plan: Plan) -> str:
    name = f"{registered}_{'flash' if backend.kernel else backend.name}_tower"
    why = "attention of a tower"
    attention = replace(
        plan.attention,
        softmax=Choice(backend.name, why),
        provider=Choice(backend.provider, why),
        varlen=Choice(backend.varlen if backend.kernel else "none", why),
    )
    with as_installed():
        attend = attention_callable(attention)
    AttentionInterface.register(name, current_guard().attention(attend))
    AttentionMaskInterface.register(name, named(backend.mask))
    return name


def _without_row(_tower: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The boundaries of a packed row are the language model's; a tower has boundaries of its own."""
    return args, {name: value for name, value in kwargs.items() if name not in ROW}
