"""The plan of a run as a frozen tree whose leaves carry their reasons, and as plain data for plan.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal

from halftune.attention.contract import AttentionPlan
from halftune.config.run import RunConfig
from halftune.core.choice import Choice, Format
from halftune.hardware import Hardware
from halftune.hardware.memory import Estimate
from halftune.plan.explain import explain
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
        Choice(True, f"samples of similar length share a batch, batches in random order {asked}")
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


_OLDEST_GPU, _OLDEST_TRITON = (8, 0), (3, 6)  # of which the operators' kernels are compiled and proven


def choose_fused(config: RunConfig, hardware: Hardware) -> Choice[bool]:
    """Whether layers that an operator knows are computed by it on this machine."""
    asked = config.training.fused_layers
    if asked is False:
        return Choice(False, "switched off (training.fused_layers)")
    if asked == "auto" and (why_not := _no_kernels(hardware)):
        return Choice(False, f"{why_not}; training.fused_layers: true asks for what runs without them")
    where = "measured faster on CPUs" if hardware.kind == "cpu" else "measured faster on one H200"
    why = "asked for (training.fused_layers)" if asked is True else f"fewer passes over memory, {where}"
    also = "" if hardware.kind == "cpu" else ", rotary embeddings"
    return Choice(True, f"{why}; norms, gated feed-forward and adapted linear layers{also}, each checked at the start")


def _no_kernels(hardware: Hardware) -> str:
    """Why the operators have no kernels on this machine; empty if they have, and on CPUs, which need none."""
    if hardware.kind == "cpu":
        return ""
    if hardware.kind != "cuda":
        return f"no kernels for {hardware.kind}"
    capability = min(device.capability or (0, 0) for device in hardware.devices)
    if capability < _OLDEST_GPU:
        return f"no kernels for compute capability {capability[0]}.{capability[1]}, which is below 8.0"
    triton = hardware.version("triton")  # None where a machine is described without its packages
    if triton is not None and tuple(int(part) for part in triton.split(".")[:2]) < _OLDEST_TRITON:
        return f"Triton {triton} is older than 3.6"
    return ""


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


NO_REFERENCE = Choice("none", "the loss needs no reference model")


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


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(Estimate):
    """Estimated bytes on one device, and whether they fit.

    Attributes:
        available: the device's memory.
        checkpoint_disk: bytes that one checkpoint takes.
        verdict: fits / tight / does not fit, with the reason.
    """

    available: int
    checkpoint_disk: int
    verdict: Choice[str]


@dataclass(frozen=True)
class ParallelPlan:
    """How processes share the work, beyond ``Plan.distribution``, which names the strategy.

    Attributes:
        machines: that train together.
        param, reduce, buffer: dtypes in which weights are gathered, gradients are summed over processes, and buffers
            are kept.
        wrap: class names of the modules that fsdp2 gathers one after the other; empty for the layers.
        reshard, offload: fsdp2's choices.
        sync_each: under fsdp2, whether gradients are summed after every forward pass of a step, not once a step.
        gather_once: under fsdp2, whether the weights stay gathered while the model answers prompts; None if it does
            not.
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
    gather_once: Choice[bool] | None = None
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
class PartPlan:
    """A part of a multimodal model in a run on images or audio.

    Attributes:
        name: ``language | vision | audio | projector``.
        parameters: number of weights.
        trained: ``frozen | lora | full``.
        dtype: of its weights; those of adapters are ``precision.trainable``.
        attention: backend of its attention; ``-`` without attention.
        keep_fp32: what stays fp32 in it.
        learning_rate: peak; None if it is frozen.
    """

    name: str
    parameters: int
    trained: Choice[str]
    dtype: Choice[str]
    attention: Choice[str]
    keep_fp32: Choice[str]
    learning_rate: Choice[float] | None


@dataclass(frozen=True)
class Plan:
    """Everything that was decided about a run, each with its reason.

    Attributes:
        device: kind of the devices: ``cuda | rocm | mps | xpu | cpu``.
        precision, attention, batch, memory: the parts.
        distribution: ``single | ddp | fsdp2``.
        parallel: how processes share the work; None with one.
        num_parameters, num_trainable: weights of the language model, and those that are trained, of all parts.
        warnings: full sentences that the user must see before training, those of the parts included.
        model, machine: what the plan is for, in words.
        method: what is learned.
        weights: whether and by whom they are quantised.
        train_only: regular expressions of the parameters that full fine-tuning trains; None: all, or an adapter.
        added_tokens: embedding rows that ``model.tokens.add`` adds; None without it.
        optimizer: by its name in ``training.optim``, and which weights it updates.
        teacher: how the model that this one learns from is computed; None without one.
        towers: what becomes of a multimodal checkpoint's towers, ``kept | used | left out``; None without any.
        features: whether frozen towers are computed once per image and sound; None without media.
        parts: how each part of a multimodal model is trained; empty unless the towers are used.
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
    parts: tuple[PartPlan, ...] = ()
    features: Choice[bool] | None = None
    method: MethodPlan = MethodPlan(Choice("sft", "the labelled tokens of conversations"), NO_REFERENCE)
    optimizer: Choice[str] | None = None
    weights: WeightsPlan = WeightsPlan()
    added_tokens: Choice[int] | None = None
    train_only: tuple[str, ...] | None = None
    teacher: Plan | None = None

    def __str__(self) -> str:
        return explain(self)

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def all_parameters(self) -> Choice[int]:
        """Weights that the run loads: ``num_parameters``, and those of the towers that it uses."""
        count = sum(part.parameters for part in self.parts)
        return replace(self.num_parameters, value=count) if count else self.num_parameters

    def mode(self, part: str) -> str:
        """How a part is trained: ``frozen | lora | full``; parts without a row are frozen."""
        return next((one.trained.value for one in self.parts if one.name == part), "frozen")


def unpacked(plan: Plan, reason: str) -> Plan:
    """The plan with one sample in a row."""
    batch = replace(plan.batch, packing=Choice(False, reason))
    return replace(plan, batch=batch, attention=replace(plan.attention, varlen=Choice("none", "rows are not packed")))
