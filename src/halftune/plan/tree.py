"""The plan of a run as a frozen tree whose leaves carry their reasons, and as plain data for plan.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, Literal

from halftune.attention.contract import AttentionPlan
from halftune.config.run import RunConfig
from halftune.core.choice import Choice, Format
from halftune.precision import PrecisionPlan

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


def to_dict(plan: Plan) -> dict[str, Any]:
    """The whole tree in JSON's types: a choice is ``{"value": …, "reason": …}``, dtypes are ``bf16 | fp16 | fp32``."""
    data = _plain(plan)
    data["memory"]["total"] = plan.memory.total
    return data


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


RANDOM = Choice(False, "batches of random samples")
UNFUSED = Choice(False, "the model's own code")
UNQUANTISED = Choice("none", "weights are not quantised")
TOKENS = Choice("tokens", "the checkpoint's output layer")
EACH = Choice(True, "a step has one forward pass")


@dataclass(frozen=True)
class MethodPlan:
    """What is learned, and what it is compared with.

    Attributes:
        name: type of the method.
        reference: ``none``, ``adapter off`` (the base model, in every step), ``precomputed`` (before training) or
            ``teacher`` (another model, in every step).
        head: what the model ends in: ``tokens`` or ``score``.
    """

    name: Choice[str]
    reference: Choice[str]
    head: Choice[str] = TOKENS


NO_REFERENCE = Choice("none", "the loss is that of the model alone")


@dataclass(frozen=True)
class BatchPlan:
    """How samples reach the devices.

    Attributes:
        micro_batch: rows per device and forward; with ``tokens_per_batch`` those of ``max_length``.
        accumulation: forwards per optimizer step.
        world_size: processes.
        tokens_per_step: upper bound, rows × max_length or ``tokens_per_batch``.
        packing: whether several samples share a row (``auto`` is decided here from the model's family; a start-up check
            may still refuse it, loudly).
        gradient_checkpointing: whether activations are recomputed.
        tokens_per_batch: tokens per device and forward, where they were asked for instead of rows.
        grouped: whether rows of like length share a batch; only without packing.
        fused_layers: whether layers that an operator knows are computed by it; the start says which they are.
    """

    micro_batch: int
    accumulation: int
    world_size: int
    tokens_per_step: int
    packing: Choice[bool]
    gradient_checkpointing: Choice[bool]
    tokens_per_batch: int | None = None
    grouped: Choice[bool] = RANDOM
    fused_layers: Choice[bool] = UNFUSED


@dataclass(frozen=True)
class MemoryPlan:
    """Estimated bytes on one device, and whether they fit.

    Attributes:
        weights, gradients, optimizer, activations, logits, overhead: the parts; overhead is the runtime itself.
        overlap: bytes that gradients take over from activations that are freed as they come.
        available: the device's memory.
        checkpoint_disk: bytes that one checkpoint takes.
        verdict: fits / tight / does not fit, with the reason.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    overhead: int
    available: int
    checkpoint_disk: int
    verdict: Choice[str]
    overlap: int = 0

    @property
    def total(self) -> int:
        """Peak bytes: the sum of the parts less the overlap."""
        parts = self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.overhead
        return parts - self.overlap


@dataclass(frozen=True)
class ParallelPlan:
    """How processes share the work, beyond ``Plan.distribution``, which names the strategy.

    Attributes:
        machines: that train together.
        param, reduce, buffer: dtypes in which weights are gathered, gradients are summed over processes, and buffers
            are kept.
        wrap: class names of the modules that fsdp2 gathers one after the other; empty for the decoder layers.
        reshard, offload: fsdp2's choices.
        sync_each: under fsdp2, whether gradients are summed after every forward pass of a step, not once a step.
        timeout: seconds after which a process that does not answer ends the run.
        memory: (strategy, estimated bytes on one device, whether they fit), of every strategy that is possible.
    """

    machines: int
    param: Choice[Format]
    reduce: Choice[Format]
    buffer: Choice[str]
    wrap: tuple[str, ...] = ()
    reshard: bool = True
    offload: bool = False
    sync_each: Choice[bool] = EACH
    timeout: float = 600.0
    memory: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True)
class WeightsPlan:
    """How frozen weights are stored.

    Attributes:
        format: a row of ``halftune.config.weight_formats``.
        origin: whether the checkpoint has them so, or they are quantised on load.
        experts: whether fused experts are quantised on load, too.
    """

    format: Choice[str] = UNQUANTISED
    origin: Literal["checkpoint", "on_load"] = "checkpoint"
    experts: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything that was decided about a run, each with its reason.

    Attributes:
        device: kind of the devices: ``cuda | rocm | mps | xpu | cpu``.
        precision, attention, batch, memory: the parts.
        distribution: ``single | ddp | fsdp2``.
        parallel: how processes share the work; None with one.
        num_parameters, num_trainable: weights, and those that are trained.
        warnings: full sentences that the user must see before training, those of the parts included.
        model, machine: what the plan is for, in words.
        method: what is learned.
        weights: whether and by whom they are quantised.
        train_only: regular expressions of the parameters that full fine-tuning trains; None: all, or an adapter.
        added_tokens: embedding rows that ``model.tokens.add`` adds; None without it.
        optimizer: by its name in ``training.optim``, and which weights it updates.
        teacher: how the model that this one learns from is computed; None without one.
        towers: what becomes of a multimodal checkpoint's towers, ``kept | left out``; None without any.
    """

    device: Choice[str]
    precision: PrecisionPlan
    attention: AttentionPlan
    batch: BatchPlan
    memory: MemoryPlan
    distribution: Choice[str]
    num_parameters: Choice[int]
    num_trainable: Choice[int]
    warnings: tuple[str, ...] = ()
    model: str = ""
    machine: str = ""
    parallel: ParallelPlan | None = None
    towers: Choice[str] | None = None
    method: MethodPlan = MethodPlan(Choice("sft", "the labelled tokens of conversations"), NO_REFERENCE)
    optimizer: Choice[str] | None = None
    weights: WeightsPlan = WeightsPlan()
    added_tokens: Choice[int] | None = None
    train_only: tuple[str, ...] | None = None
    teacher: Plan | None = None


def unpacked(plan: Plan, reason: str) -> Plan:
    """The plan with one sample in a row."""
    batch = replace(plan.batch, packing=Choice(False, reason))
    return replace(plan, batch=batch, attention=replace(plan.attention, varlen=Choice("none", "rows are not packed")))
