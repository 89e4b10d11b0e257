"""The plan of a run's result where it answers: nothing is trained, and weights are as they are stored."""

from __future__ import annotations

from dataclasses import replace

from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.config.sections.method import SftMethod
from halftune.config.sections.model import LoraAdapter, TrainSection
from halftune.config.sections.training import DistributedSection, PartRatesSection
from halftune.core.choice import Choice, Format
from halftune.hardware import Hardware
from halftune.hardware.memory import RUNTIME_BYTES, weight_bytes
from halftune.plan.constraints import constrained
from halftune.plan.decide import decide
from halftune.plan.memory import BYTES
from halftune.plan.request import Request
from halftune.plan.tree import MemoryPlan, Plan
from halftune.precision.resolve import frozen_precision

NOTHING_TRAINED = "inference: nothing is trained"


def resolve_inference(
    config: RunConfig, hardware: Hardware, facts: ModelFacts, adapter: Format | None = None, *, packed: bool = False
) -> Plan:
    """Decides how a result answers, in one process; pure.

    What only training asks for (trained dtypes, optimizer, processes) has no say.

    Args:
        config: of the run.
        hardware: the machine.
        facts: the model that is loaded: the base of an adapter, or the trained model.
        adapter: the format in which the adapter is stored; None of a full model.
        packed: whether losses of packed rows are computed, too; rows are packed where `auto` would.

    Raises:
        PlanError: this machine or model cannot honour what was asked.
    """
    asked = _without_training(config)
    if packed and config.data.packing.enabled:
        packing = config.data.packing.model_copy(update={"enabled": "auto"})
        asked = asked.model_copy(update={"data": config.data.model_copy(update={"packing": packing})})
    plan = _frozen(decide(constrained(Request(asked, facts)), hardware), facts, adapter)
    if packed:
        return plan
    apart = replace(plan.attention, varlen=Choice("none", "rows are not packed"))
    off = Choice(False, NOTHING_TRAINED)
    return replace(plan, attention=apart, batch=replace(plan.batch, packing=off, grouped=off))


def resolve_teacher(config: RunConfig, hardware: Hardware, facts: ModelFacts | None) -> Plan:
    """Decides how a run's teacher is computed beside the model in training: on the same batches, and frozen; pure.

    Args:
        config: of the run.
        hardware: the machine.
        facts: of the teacher.

    Raises:
        PlanError: this machine or the teacher cannot honour what was asked.
    """
    teacher = config.method.teacher_model
    assert teacher is not None
    assert facts is not None
    asked = _without_training(config.model_copy(update={"model": teacher, "method": SftMethod()}))
    plan = decide(constrained(Request(asked.model_copy(update={"data": config.data}), facts)), hardware)
    return _frozen(plan, facts, None)


def _frozen(plan: Plan, facts: ModelFacts, adapter: Format | None) -> Plan:
    """The plan without what only training needs."""
    precision = frozen_precision(plan.precision, adapter)
    off = Choice(False, NOTHING_TRAINED)
    return replace(
        plan,
        precision=precision,
        batch=replace(plan.batch, gradient_checkpointing=off, fused_layers=off),
        memory=_memory(plan, facts, BYTES[precision.storage.value]),
        num_trainable=Choice(0, NOTHING_TRAINED),
        warnings=precision.warnings,
    )


def _without_training(config: RunConfig) -> RunConfig:
    precision = {"linear": "auto", "trainable": "auto", "optimizer_state": "auto"}
    training = {"torch_compile": False, "gradient_checkpointing": False, "optim": "adamw"}
    training |= {"part_learning_rates": PartRatesSection()}
    packing = config.data.packing.model_copy(update={"enabled": False})
    return config.model_copy(
        update={
            "precision": config.precision.model_copy(update=precision),
            "training": config.training.model_copy(update=training),
            "data": config.data.model_copy(update={"packing": packing}),
            "distributed": DistributedSection(),
            "adapter": LoraAdapter(),  # its base is frozen, as all is here
            "model": config.model.model_copy(update={"train": TrainSection()}),
            "method": config.method if config.method.teacher_model is None else SftMethod(),
        }
    )


def _memory(plan: Plan, facts: ModelFacts, width: int) -> MemoryPlan:
    """Weights and the runtime; the key-value cache grows with the conversation and is not counted."""
    weights = weight_bytes(facts, plan.weights.format.value, width)
    overhead = RUNTIME_BYTES[plan.device.value]  # pyright: ignore[reportArgumentType]
    available = plan.memory.available
    verdict = Choice("fits" if weights + overhead <= available else "does not fit", NOTHING_TRAINED)
    return MemoryPlan(weights, 0, 0, 0, 0, overhead, available=available, checkpoint_disk=0, verdict=verdict)
