"""Resolves the plan from config, hardware and model facts: every decision of a run, in one place and order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from halftune.attention.contract import AttentionPlan
from halftune.config.facts.families import other_class
from halftune.config.facts.model import ModelFacts
from halftune.config.optimizers import OPTIMIZERS
from halftune.config.run import RunConfig
from halftune.config.sections.method import GrpoMethod, ReferenceMethod
from halftune.config.sections.model import AdapterSection, LoraAdapter, ModelSection, NoAdapter
from halftune.config.weight_formats import WEIGHT_FORMATS
from halftune.core.choice import Choice, Format
from halftune.core.errors import PlanError, ProblemCollector
from halftune.hardware import Hardware
from halftune.plan.distribution import choose_strategy, choose_sync, main_memory, plan_parallel, sharing_problems
from halftune.plan.first_rate import rate_warning
from halftune.plan.memory import per_process, plan_memory, workload
from halftune.plan.packing import Rows, choose_rows
from halftune.plan.parts import choose_features, count_parts, plan_parts, tower_work, towers_row, with_parts
from halftune.plan.trainable import Adapted, choose_optimizer
from halftune.plan.tree import NO_REFERENCE, MethodPlan, Plan, WeightsPlan, choose_fused, plan_batch, unpacked
from halftune.precision import PrecisionPlan
from halftune.precision.resolve import asked_compute, resolve_precision

_WHERE, _AS_STORED = "model.quantization", "as the checkpoint stores them"


def choose_weights(model: ModelSection, hardware: Hardware, facts: ModelFacts) -> tuple[ModelFacts, WeightsPlan]:
    """The format of the frozen weights, and the facts of the model as it is after loading.

    Raises:
        PlanError: ``model.quantization`` is not possible for this checkpoint or on this device.
    """
    asked, stored = model.quantization, facts.quantization
    if asked == "none":
        if stored is None:
            return facts, WeightsPlan()
        kept = stored not in WEIGHT_FORMATS or WEIGHT_FORMATS[stored].bytes_per_param is not None
        return facts, WeightsPlan(Choice(stored, _AS_STORED if kept else f"{_AS_STORED}, dequantised on load"))
    row = WEIGHT_FORMATS[asked]
    if stored is not None:
        what = f"the checkpoint is quantised already ({stored})"
        raise PlanError(what, where=_WHERE, remedy="model.quantization: none", code="plan.quantization_unavailable")
    if facts.multimodal:
        what = f"{asked} on load is not supported for a checkpoint with towers"
        raise PlanError(
            what,
            where=_WHERE,
            remedy="model.parts: text, or model.quantization: none",
            code="plan.quantization_unavailable",
        )
    if hardware.kind not in row.devices:
        what = f"{asked} on load is not supported on {hardware.kind}"
        raise PlanError(what, where=_WHERE, remedy="model.quantization: none", code="plan.quantization_unavailable")
    width = row.bytes_per_param or 0.0
    reason = f"asked for: frozen linear layers take {width:g} bytes per weight; embeddings, output layer and norms stay"
    experts = model.quantize_experts
    if experts:
        from halftune.plan.experts import check_quantised  # few runs quantise experts

        reason += f"; so are {check_quantised(facts):,} weights of fused experts"
    quantised = replace(facts, quantization=asked, quantized_experts=experts)
    return quantised, WeightsPlan(Choice(asked, reason), "on_load", experts)


def plan_method(config: RunConfig, facts: ModelFacts, teacher: Plan | None = None) -> MethodPlan:
    """The method's part of the plan. The reference is the model before training, with an adapter that it starts from,
    or the teacher.

    Raises:
        PlanError: the base model is asked for as the reference, and this run does not keep it.
    """
    method = config.method
    name = Choice(method.type, method.learns)
    if teacher is not None:
        storage, compute = teacher.precision.storage.value, teacher.precision.compute.value
        stored = f"{teacher.num_parameters.value:,} frozen weights in {storage}, computed in {compute}"
        return MethodPlan(name, Choice("teacher", f"{teacher.model}: {stored}"))
    if method.head == "score":
        from halftune.plan.score_head import score_head  # few runs train a reward model

        return MethodPlan(name, NO_REFERENCE, score_head(facts))
    if isinstance(method, GrpoMethod) and method.beta:
        method = ReferenceMethod(reference="adapter_off")
    reference = _reference(method, config.adapter) if isinstance(method, ReferenceMethod) else NO_REFERENCE
    return MethodPlan(name, reference)


def _reference(method: ReferenceMethod, adapter: AdapterSection) -> Choice[str]:
    """How the model before training is kept.

    Raises:
        PlanError: this run does not keep it, and the method asks for it.
    """
    lora = adapter if isinstance(adapter, LoraAdapter) else None
    lost = adapter.type == "none" or (lora is not None and lora.reduces_base)
    if lost and method.reference == "adapter_off":
        raise PlanError(
            "this run does not keep the base model, which is asked for as the reference",
            where="method.reference",
            remedy="method.reference: auto",
            code="plan.no_reference_model",
        )
    continued = lora is not None and lora.name_or_path is not None
    if {"precomputed": True, "adapter_off": False}.get(method.reference, lost or continued):
        return Choice("precomputed", PRECOMPUTED[lost, continued])
    return Choice("adapter off", ADAPTER_OFF[continued])


_PASS = "one forward pass over all examples before training, 8 bytes per answer"
# (whether the base weights change, whether training starts from an adapter) → reason
PRECOMPUTED = {
    (True, False): f"training changes the base weights: {_PASS}",
    (True, True): f"training changes the base weights: {_PASS}",
    (False, True): f"the model with the adapter that training starts from: {_PASS}",
    (False, False): f"asked for: {_PASS}",
}
ADAPTER_OFF = {
    False: "the frozen model without the adapter: no extra memory, a second forward pass",
    True: "asked for: the base model without the adapter that training starts from, by a second forward pass",
}
_OLD_CUDA = (7, 5)
_BROKEN_GRAPHS = (
    "training.torch_compile with packed rows: attention by segments reads the rows' lengths, which ends a graph in "
    "every layer: compiling takes minutes, and little is fused; data.packing: false compiles whole layers."
)
COUNTED = {
    "headers": "counted in the headers of the weights",
    "architecture": "counted in the architecture that transformers builds from config.json",
    "catalogue": "counted in the architecture that transformers builds from halftune's own copy of config.json",
    "sizes": "estimated from sizes: transformers cannot build this config",
    "own code": "estimated from sizes: remote code builds this model",
}


def resolve(config: RunConfig, hardware: Hardware, facts: ModelFacts, world_size: int = 1) -> Plan:
    """Decides everything about a run; pure, and nothing below decides again.

    Args:
        config: what was asked.
        hardware: the machine, probed or from the catalogue.
        facts: the model's config.json as facts.
        world_size: processes, one device each.

    Raises:
        PlanError: machine or model cannot honour what was asked; lists everything, with reasons and remedies.
    """
    config, added = with_parts(config, facts), None
    if config.model.tokens.add:
        from halftune.plan.added_tokens import with_added_tokens  # few runs add tokens

        config, facts, added = with_added_tokens(config, facts)
    if config.method.head == "score" or facts.scores:
        from halftune.plan.score_head import with_score_head  # few runs train a reward model

        config, facts = with_score_head(config, facts)
    teacher = _teacher(config, hardware, facts)
    facts, weights = choose_weights(config.model, hardware, facts)
    precision, (packing, attention), adapted, method = _decided(config, hardware, facts, teacher)
    fused = choose_fused(config, hardware)
    work = workload(config, hardware, facts, precision, attention, packing.value, adapted, fused.value)
    work = replace(work, teacher=teacher.memory.weights if teacher else 0, towers=tower_work(config))
    distribution, work = choose_strategy(config, hardware, facts, work, world_size)
    available = per_process(hardware, max(1, world_size // config.distributed.num_machines))
    sync = choose_sync(config, facts, work, available)
    work = replace(work, sync_each=sync.value)
    checkpointing, memory = plan_memory(config, facts, work, available)
    batch = plan_batch(config, world_size, packing, checkpointing, fused)
    warnings = _warnings(config, hardware, facts, world_size, memory.verdict)
    warnings += _of_compiling(config, facts, attention)
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
        added_tokens=added,
        train_only=_trained(config, facts),
        teacher=teacher if teacher is None or packing.value else unpacked(teacher, packing.reason),
    )


def _of_compiling(config: RunConfig, facts: ModelFacts, attention: AttentionPlan) -> Iterator[str]:
    outside = attention.softmax.value == "eager" or facts.attention_dropout > 0
    if config.training.torch_compile and attention.varlen.value == "segments" and outside:
        yield _BROKEN_GRAPHS


def _teacher(config: RunConfig, hardware: Hardware, facts: ModelFacts) -> Plan | None:
    """The plan of the model that this one learns from."""
    if config.method.teacher_model is None:
        return None
    from halftune.plan.inference import resolve_teacher  # few runs have a teacher

    assert facts.teacher is not None
    return resolve_teacher(config, hardware, facts.teacher)


def _trained(config: RunConfig, facts: ModelFacts) -> tuple[str, ...] | None:
    if not isinstance(config.adapter, NoAdapter) or not config.adapter.is_partial:
        return None
    from halftune.plan.train_only import trained_patterns  # few runs freeze parts

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
        raise PlanError(
            f"optim: {name} is not supported on {hardware.kind}",
            where="training.optim",
            remedy="training.optim: adamw",
            code="plan.optimizer_unavailable",
        )
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


def _of_the_machine(hardware: Hardware, world_size: int, machines: int) -> Iterator[str]:
    for note in hardware.notes:
        yield f"{note[0].upper()}{note[1:]}."
    everyone = len(hardware.devices) * machines
    if hardware.kind != "cpu" and world_size < everyone:
        yield f"{world_size} of {everyone} devices is used (distributed.num_processes)."
    old = [device.name for device in hardware.devices if device.capability and device.capability < _OLD_CUDA]
    if old:
        yield f"{old[0]}: torch's CUDA 13 builds have no kernels below compute capability 7.5; use a CUDA 12 build."


def _of_the_class(config: RunConfig, facts: ModelFacts, raw: dict[str, Any]) -> Iterator[str]:
    """Warnings about the parts of a checkpoint that the loaded class does not have."""
    if not facts.scores and (other := other_class(raw, facts.multimodal)):
        named, loaded = other
        yield f"config.json names the class {named}; {loaded} is loaded, with a head for tokens."
    if heads := facts.prediction_heads:
        stored = facts.quantization if config.model.quantization == "none" else None
        named = f"{len(heads)} tensors for multi-token prediction, first {heads[0]}"
        left_out = f"{named}: not trained, and left out of merged models, as the base is in {stored}."
        yield left_out if stored else f"{named}: not trained, saved unchanged."


def _warnings(
    config: RunConfig, hardware: Hardware, facts: ModelFacts, world_size: int, verdict: Choice[str]
) -> list[str]:
    """What the parts do not see by themselves."""
    warnings = [*_of_the_machine(hardware, world_size, config.distributed.num_machines)]
    longest = facts.max_position_embeddings
    if longest and config.data.max_length > longest:
        warnings.append(
            f"data.max_length is {config.data.max_length:,}, and the model was made for {longest:,} positions."
        )
    warnings += [*_unembedded(facts), *rate_warning(config)]
    raw: dict[str, Any] = facts.raw or {}
    if not (config.model.trust_remote_code and "auto_map" in raw):
        warnings += _of_the_class(config, facts, raw)
    if verdict.value == "does not fit":
        warnings.append(f"The run is not expected to fit: {verdict.reason}.")
    return warnings


def _unembedded(facts: ModelFacts) -> list[str]:
    """What is to be said of a tokenizer that knows more tokens than the model has embeddings."""
    rows, tokens = facts.vocab_size, facts.tokens
    if tokens is None or tokens.all <= rows:
        return []
    if tokens.ordinary > rows:
        said = (
            f"The tokenizer has {tokens.ordinary:,} tokens, the model {rows:,} embeddings: text with one of the others"
        )
        return [f"{said} stops the run (model.tokenizer names the tokenizer that the model was trained with)."]
    said = f"The tokenizer's added tokens go up to id {tokens.all - 1:,}, the model has {rows:,} embeddings"
    return [f"{said}: a row with one of the others stops the run; padding may be one."]
