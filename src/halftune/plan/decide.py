"""Decides everything about one model of a run, in one order; pure."""

from __future__ import annotations

from dataclasses import replace

from halftune.config.facts.model import ModelFacts
from halftune.config.optimizers import OPTIMIZERS
from halftune.config.run import RunConfig
from halftune.config.sections.model import NoAdapter
from halftune.core.choice import Choice, Format
from halftune.core.errors import PlanError, ProblemCollector
from halftune.hardware import Hardware
from halftune.plan.distribution import choose_strategy, choose_sync, main_memory, plan_parallel, sharing_problems
from halftune.plan.memory import per_process, plan_memory, workload
from halftune.plan.method import plan_method
from halftune.plan.packing import Rows, choose_rows
from halftune.plan.plan_warnings import of_compiling, plan_warnings
from halftune.plan.request import Request
from halftune.plan.tree import MethodPlan, Plan, choose_fused, plan_batch, unpacked
from halftune.plan.weights.frozen import choose_weights
from halftune.plan.weights.parts import choose_features, count_parts, plan_parts, tower_work, towers_row
from halftune.plan.weights.train_only import trained_patterns
from halftune.plan.weights.trainable import Adapted, choose_optimizer
from halftune.precision import PrecisionPlan
from halftune.precision.resolve import asked_compute, resolve_precision

COUNTED = {
    "headers": "counted in the headers of the weights",
    "architecture": "counted in the architecture that transformers builds from config.json",
    "catalogue": "counted in the architecture that transformers builds from halftune's own copy of config.json",
    "sizes": "estimated from sizes: transformers cannot build this config",
    "unbuilt": "estimated from sizes: building this config was not possible this time, see the warning",
    "own code": "estimated from sizes: remote code builds this model",
}


def decide(request: Request, hardware: Hardware, world_size: int = 1, teacher: Plan | None = None) -> Plan:
    """Decide everything about one model.

    Args:
        request: config and model, as the constraints leave them.
        hardware: the machine, probed or from the catalogue.
        world_size: processes, one device each.
        teacher: the plan of the model that this one learns from.

    Raises:
        PlanError: machine or model cannot honour what was asked; lists everything, with reasons and remedies.
    """
    config, (facts, weights) = request.config, choose_weights(request.config.model, hardware, request.facts)
    precision, (packing, attention), adapted, method = _decided(config, hardware, facts, teacher)
    fused = choose_fused(config, hardware)
    work = workload(config, hardware, facts, precision, attention, packing.value, adapted, fused.value)
    work = replace(
        work, teacher=teacher.memory.weights if teacher else 0, towers=tower_work(config), media=config.data.media
    )
    distribution, work = choose_strategy(config, hardware, facts, work, world_size)
    available = per_process(hardware, max(1, world_size // config.distributed.num_machines))
    sync = choose_sync(config, facts, work, available)
    work = replace(work, sync_each=sync.value)
    checkpointing, memory = plan_memory(config, facts, work, available)
    batch = plan_batch(config, world_size, packing, checkpointing, fused)
    warnings = plan_warnings(config, hardware, facts, world_size, memory.verdict)
    warnings += of_compiling(config, facts, attention, precision)
    if crowded := main_memory(config, hardware, facts, work, max(1, world_size // config.distributed.num_machines)):
        warnings.append(crowded)
    return Plan(
        device=_device(hardware),
        precision=precision,
        attention=attention,
        batch=batch,
        memory=memory,
        distribution=distribution,
        num_parameters=Choice(facts.num_parameters, COUNTED[facts.counted_in]),
        num_trainable=adapted.count,
        optimizer=choose_optimizer(config, adapted, hardware.kind),
        weights=weights,
        warnings=(*precision.warnings, *warnings),
        model=f"{facts.name_or_path} ({facts.model_type})",
        machine=_machine(hardware),
        parallel=plan_parallel(config, hardware, facts, precision, work, world_size, sync, available),
        towers=towers_row(config, facts),
        parts=plan_parts(config, facts, precision, attention),
        features=choose_features(config, facts, precision, distribution.value),
        method=method,
        added_tokens=request.added_tokens,
        train_only=_trained(config, facts),
        teacher=teacher if teacher is None or packing.value else unpacked(teacher, packing.reason),
    )


def _trained(config: RunConfig, facts: ModelFacts) -> tuple[str, ...] | None:
    if not isinstance(config.adapter, NoAdapter) or not config.adapter.is_partial:
        return None
    return trained_patterns(config.adapter, facts)


def _decided(
    config: RunConfig, hardware: Hardware, facts: ModelFacts, teacher: Plan | None
) -> tuple[PrecisionPlan, Rows, Adapted, MethodPlan]:
    """What hangs together least, each decided whether or not the others can be.

    Raises:
        PlanError: one of them cannot, or several.
    """
    tried = ProblemCollector()
    precision = tried.collect(lambda: _precision(config, hardware, facts))
    compute = asked_compute(config.precision, hardware, facts, full=config.adapter.type == "none")
    compute = precision.compute.value if precision is not None else compute
    rows = _rows(config, hardware, facts, compute, tried, teacher)
    adapted = tried.collect(lambda: count_parts(config, facts))
    method = tried.collect(lambda: plan_method(config, facts, teacher))
    tried.add(sharing_problems(config, hardware, facts, compute))
    if tried.error is not None:
        raise tried.error
    assert precision is not None and rows is not None and adapted is not None and method is not None  # noqa: PT018
    return precision, rows, adapted, method


def _rows(
    config: RunConfig,
    hardware: Hardware,
    facts: ModelFacts,
    compute: Format,
    tried: ProblemCollector,
    teacher: Plan | None,
) -> Rows | None:
    """As ``choose_rows``; not packed where the teacher's are not."""
    data, known = config.data, None if teacher is None else teacher.batch.packing
    if known is None or known.value or data.packing.enabled is False:
        return choose_rows(config, hardware, facts, compute, tried)
    packing = data.packing.model_copy(update={"enabled": False})
    alone = config.model_copy(update={"data": data.model_copy(update={"packing": packing})})
    rows = choose_rows(alone, hardware, facts, compute, tried)
    return rows and (Choice(False, f"as with the teacher: {known.reason}"), rows[1])


def _precision(config: RunConfig, hardware: Hardware, facts: ModelFacts) -> PrecisionPlan:
    row, section = OPTIMIZERS[config.training.optim], config.precision
    if row.state_format:  # whatever the weights are
        section = section.model_copy(update={"optimizer_state": "fp32"})
    precision = resolve_precision(section, hardware, facts, config.adapter)
    _check_optimizer(config, hardware, precision)
    if not row.state_format:
        return precision
    blocks = {"8bit": "blocks of 256 with fp32 scales", "4bit": "blocks of 128 with fp32 scales"}
    why = blocks.get(row.state_format, "fixed by the optimizer")
    return replace(precision, optimizer_state=Choice(row.state_format, why))


def _check_optimizer(config: RunConfig, hardware: Hardware, precision: PrecisionPlan) -> None:
    """Check that the device runs the optimizer, with its state in the dtype that was asked for.

    Raises:
        PlanError: it does not.
    """
    name, row = config.training.optim, OPTIMIZERS[config.training.optim]
    if hardware.kind not in row.devices:
        what = f"optim: {name} is not supported on {hardware.kind}"
        raise PlanError(what, where="training.optim", remedy="training.optim: adamw", code="plan.optimizer_unavailable")
    if row.state_format and config.precision.optimizer_state not in ("auto", row.state_format):
        raise PlanError(
            f"{name} keeps its state in {row.state_format}",
            where="precision.optimizer_state",
            remedy="precision.optimizer_state: auto, or training.optim: adamw",
            code="precision.optimizer_state_conflict",
        )
    if row.state_format:
        return
    pinned = precision.optimizer_state.value != precision.trainable.value
    if pinned and not OPTIMIZERS[config.training.optim].own_state_dtype:
        raise PlanError(
            f"{config.training.optim} keeps its moments in the dtype of its weights ({precision.trainable.value})",
            where="precision.optimizer_state",
            remedy="precision.optimizer_state: auto, or training.optim: adamw",
            code="precision.optimizer_state_conflict",
        )


def _device(hardware: Hardware) -> Choice[str]:
    if hardware.kind == "cpu":
        return Choice("cpu", next(iter(hardware.notes), "no accelerator was found"))
    return Choice(hardware.kind, f"{len(hardware.devices)} found: {_counted(hardware)}")


def _counted(hardware: Hardware) -> str:
    names = [device.name for device in hardware.devices]
    parts = [f"{names.count(name)} × {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    return ", ".join(parts)


def _machine(hardware: Hardware) -> str:
    gigabytes = hardware.host_memory_bytes / 2**30
    return f"{_counted(hardware)}; {hardware.cpu_cores} cores, {gigabytes:.0f} GiB of main memory"
