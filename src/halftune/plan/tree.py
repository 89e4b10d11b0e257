"""The plan of a run as a frozen tree: every leaf that was decided carries its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halftune.attention.plan import AttentionPlan
from halftune.core.choice import Choice
from halftune.core.formats import Format
from halftune.precision.plan import PrecisionPlan

RANDOM = Choice(False, "batches of random samples")
UNFUSED = Choice(False, "the model's own code")
UNQUANTISED = Choice("none", "weights are not quantised")
EACH = Choice(True, "a step has one forward pass")


@dataclass(frozen=True)
class MethodPlan:
    """What is learned, and what it is compared with.

    Attributes:
        name: type of the method.
        reference: ``none`` or ``adapter off``: the model in training with its adapter switched off.
    """

    name: Choice[str]
    reference: Choice[str]


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
    """

    format: Choice[str] = UNQUANTISED
    origin: Literal["checkpoint", "on_load"] = "checkpoint"


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
        optimizer: by its name in ``training.optim``, and which weights it updates.
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
