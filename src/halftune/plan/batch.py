"""How large a forward pass is: so many rows, or as many as a number of tokens holds."""

from __future__ import annotations

from halftune.config.run import RunConfig
from halftune.core.choice import Choice
from halftune.plan.tree import BatchPlan

DEFAULT_ROWS = 4


def batch_size(config: RunConfig) -> tuple[int, int | None]:
    """Examples of ``max_length`` in a forward pass of one device, and its tokens where they were asked for instead."""
    training = config.training
    if training.tokens_per_batch is None:
        return training.per_device_train_batch_size or DEFAULT_ROWS, None
    longest = config.method.segments * config.data.max_length
    return max(1, training.tokens_per_batch // longest), training.tokens_per_batch


def plan_batch(
    config: RunConfig,
    world_size: int,
    packing: Choice[bool],
    gradient_checkpointing: Choice[bool],
    fused: Choice[bool],
) -> BatchPlan:
    """The batch part of the plan."""
    rows, tokens = batch_size(config)
    accumulation = config.training.gradient_accumulation_steps
    forward = rows * config.method.segments * config.data.max_length if tokens is None or packing.value else tokens
    asked = "(data.group_by_length)"
    grouped = (
        Choice(True, f"samples of like length share a batch, batches in random order {asked}")
        if config.data.group_by_length
        else Choice(False, f"batches of random samples; switched off {asked}")
    )
    return BatchPlan(
        micro_batch=rows,
        accumulation=accumulation,
        world_size=world_size,
        tokens_per_step=forward * accumulation * world_size,
        packing=packing,
        gradient_checkpointing=gradient_checkpointing,
        tokens_per_batch=tokens,
        grouped=grouped,
        fused_layers=fused,
    )


def choose_fused(config: RunConfig, kind: str) -> Choice[bool]:
    """Whether layers that an operator knows are computed by it on devices of this kind."""
    asked = config.training.fused_layers
    if asked is False:
        return Choice(False, "switched off (training.fused_layers)")
    if asked == "auto" and kind != "cpu":
        return Choice(False, "measured on CPUs only so far; training.fused_layers: true asks for it")
    if config.training.torch_compile:
        return Choice(False, "torch.compile fuses them itself")
    why = "asked for (training.fused_layers)" if asked is True else "fewer passes over memory, measured faster on CPUs"
    return Choice(True, f"{why}; norms, gated feed-forward and adapted linear layers, each checked at the start")
