"""Decides every dtype of a run from frozen facts: a pure function, before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from halftune.config.facts.model import ModelFacts
from halftune.config.quantised import WIDENED, refusal
from halftune.config.sections.adapter import AdapterSection
from halftune.config.sections.precision import PrecisionSection
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.core.formats import Format
from halftune.hardware.facts import Device, Hardware
from halftune.precision.families import keep_fp32, overflows_in_fp16
from halftune.precision.plan import PrecisionPlan
from halftune.precision.rounding import Rounding, roundings
from halftune.precision.truth_table import Row, describe, row_of

_TF32_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class _Compute:
    """The compute dtype, why, the device that decided, and what the user must see."""

    value: Format
    reason: str
    device: Device
    warnings: tuple[str, ...] = ()


def resolve_precision(
    section: PrecisionSection, hardware: Hardware, facts: ModelFacts, adapter: AdapterSection
) -> PrecisionPlan:
    """The plan of all dtypes, each with its reason.

    Args:
        section: what was asked for.
        hardware: where it runs; of several devices the weakest decides.
        facts: the model.
        adapter: ``none`` trains every weight; LoRA freezes the base.

    Raises:
        PlanError: the device cannot do what was asked, or two requests exclude each other.
    """
    full = adapter.type == "none"
    compute = _compute(section, hardware, full)
    _check(section, compute, facts, full)
    trainable = _trainable(section, compute, full)
    patterns, why_fp32 = keep_fp32(facts)
    storage = _storage(compute, trainable, facts, full, patterns)
    kept = Choice(patterns, why_fp32)
    state = _optimizer_state(section, trainable)
    return PrecisionPlan(
        storage=storage,
        trainable=trainable,
        compute=Choice(compute.value, compute.reason),
        autocast=_autocast(compute.value, storage.value, trainable.value, bool(patterns)),
        grad_scaler=_grad_scaler(compute.value),
        reduce=Choice(trainable.value, "gradients have the dtype of the weights that they belong to"),
        optimizer_state=state,
        saved=_saved(compute.value, trainable.value, full),
        keep_fp32=kept,
        tf32=_tf32(section, hardware, compute.value),
        experts=_experts(compute, storage.value) if facts.num_experts else None,
        warnings=(
            *compute.warnings,
            *_family_warnings(compute, facts),
            *_mixed_warnings(storage.value, facts, patterns),
            *_master_warnings(trainable.value, state.value),
            *_tf32_warnings(section, hardware),
        ),
    )


def frozen_precision(plan: PrecisionPlan, adapter: Format | None) -> PrecisionPlan:
    """The plan of a result that answers: nothing is trained, and an adapter stays in the format of its file.

    Args:
        plan: of a frozen model, as :func:`resolve_precision` gives it for an adapter.
        adapter: the format in which the adapter is stored; None of a full model. Where the compute dtype does not take
            it, the adapter is widened to fp32.
    """
    compute = plan.compute.value
    trainable: Format = compute if adapter is None else adapter if adapter == compute else "fp32"
    nothing = "inference: nothing is trained"
    return replace(
        plan,
        trainable=Choice(trainable, "the adapter as it is stored" if trainable == adapter else nothing),
        autocast=_autocast(compute, plan.storage.value, trainable, bool(plan.keep_fp32.value)),
        grad_scaler=Choice(False, nothing),
        saved=plan.saved if adapter is not None else _saved(compute, trainable, full=True),
    )


def asked_compute(section: PrecisionSection, hardware: Hardware, *, full: bool) -> Format:
    """What ``precision`` asks for, also where it cannot be had; ``auto`` always can."""
    return _compute(section, hardware, full).value if section.compute == "auto" else section.compute


def _experts(compute: _Compute, storage: Format) -> Choice[str]:
    """transformers multiplies by ``grouped_mm``; its kernel needs compute capability 8.0 on CUDA devices."""
    cast = f": autocast has no rule for it, so {storage} weights are cast for it" if storage != compute.value else ""
    old = compute.device.capability is not None and compute.device.capability < (8, 0)
    how = "expert by expert, the device has no kernel for all" if old else "one matmul for all experts"
    return Choice(f"grouped_mm in {compute.value}", f"{how}{cast}; code that loops over experts stays in autocast")


def weakest(hardware: Hardware) -> tuple[Device, Row]:
    """The device that decides: the one whose row ranks lowest, then the lowest compute capability."""
    device = min(hardware.devices, key=lambda device: (row_of(device).rank, device.capability or (0, 0)))
    return device, row_of(device)


def _compute(section: PrecisionSection, hardware: Hardware, full: bool) -> _Compute:
    device, row = weakest(hardware)
    named = describe(device)
    if len({other.name for other in hardware.devices}) > 1:
        named += f", the weakest of {len(hardware.devices)} devices,"
    auto = row.auto_full if full else row.auto
    if section.compute == "auto":
        return _Compute(auto, row.auto_reason.format(device=named), device)
    if section.compute == "fp32":
        return _Compute("fp32", "asked for; every device does fp32", device)
    request = row.bf16 if section.compute == "bf16" else row.fp16
    reason = request.reason.format(device=named)
    if request.answer == "yes":
        return _Compute(section.compute, reason, device)
    if request.answer == "warn":
        return _Compute(section.compute, reason, device, (_sentence(reason.removesuffix("; asked for")),))
    if section.on_unsupported == "fallback":
        fallen = f"{section.compute} was asked for, but {reason}; fell back to {auto} (precision.on_unsupported)"
        return _Compute(auto, fallen, device, (_sentence(fallen),))
    others = f"auto ({auto} here)" if auto == "fp32" else f"auto ({auto} here), precision: fp32"
    raise PlanError(
        f"{section.compute} is not possible: {reason}",
        where="precision",
        remedy=f"precision: {others}, or precision: {{compute: {section.compute}, on_unsupported: fallback}}",
    )


def _check(section: PrecisionSection, compute: _Compute, facts: ModelFacts, full: bool) -> None:
    """Requests that exclude each other."""
    if section.trainable == "bf16" and compute.value != "bf16":
        why = {
            "fp16": "fp16 compute needs fp32 weights under the loss scaler (torch cannot unscale half gradients)",
            "fp32": "fp32 compute on bf16 weights would compute with what bf16 has already lost",
        }[compute.value]
        raise PlanError(
            f"trainable weights in bf16 do not go with {compute.value} compute: {why}",
            where="precision.trainable",
            remedy="precision.trainable: auto, or precision.compute: bf16",
        )
    if unknown := refusal(facts.quantization):
        remedy = "take the checkpoint in bf16 or fp16 that it was made from, or one quantised by bitsandbytes"
        raise PlanError(unknown, where="model.name_or_path", remedy=remedy)
    if full and facts.quantization:
        raise PlanError(
            f"the checkpoint is quantised ({facts.quantization}): its weights cannot be trained",
            where="adapter",
            remedy="adapter: lora, or a checkpoint that is not quantised",
        )


def _trainable(section: PrecisionSection, compute: _Compute, full: bool) -> Choice[Format]:
    if section.trainable == "bf16":
        return Choice("bf16", "asked for (precision.trainable)")
    if section.trainable == "fp32":
        return Choice("fp32", "asked for (precision.trainable)")
    what = "master weights" if full else "adapters"
    if compute.value == "fp32":
        return Choice("fp32", f"{what} have the compute dtype")
    if compute.value == "fp16":
        return Choice("fp32", f"fp16 compute needs fp32 {what} under the loss scaler")
    return Choice("fp32", f"{what} in fp32 keep updates that bf16 would round away")


def _storage(
    compute: _Compute, trainable: Choice[Format], facts: ModelFacts, full: bool, kept: tuple[str, ...]
) -> Choice[Format]:
    value = trainable.value if full else compute.value
    reason = "every weight is trained: what is loaded are the master weights" if full else "frozen in the compute dtype"
    if facts.quantization in WIDENED:
        return Choice(value, f"{reason}; the checkpoint's {facts.quantization} weights are written out in it on load")
    if facts.quantization:
        return Choice(value, f"{reason}; the {facts.quantization} weights stay quantised and compute in it")
    if _is_mixed(facts):
        rounded = "; ".join(_rounded(one, facts) for one in roundings(facts.stored, value, kept))
        return Choice(value, f"{reason}; {rounded or 'nothing of the checkpoint is rounded on load'}")
    if facts.dtype is not None and facts.dtype != value:
        change = "widened without loss" if value == "fp32" and facts.dtype != "fp64" else "rounded"
        reason += f"; the checkpoint's {facts.dtype} is {change} on load"
    return Choice(value, reason)


def _is_mixed(facts: ModelFacts) -> bool:
    return len(set(facts.stored.values())) > 1 and not facts.quantization


def _rounded(one: Rounding, facts: ModelFacts) -> str:
    """The tensors of one format that a load rounds, as a piece of a sentence."""
    return (
        f"{len(one.names)} of {len(facts.stored)} tensors are {one.source} in the checkpoint and rounded to "
        f"{one.target} on load, first {one.names[0]}"
    )


def _mixed_warnings(storage: Format, facts: ModelFacts, kept: tuple[str, ...]) -> Iterator[str]:
    """What a load rounds of a checkpoint in several formats: its makers may have meant the difference."""
    for one in roundings(facts.stored, storage, kept) if _is_mixed(facts) else ():
        yield f"{_rounded(one, facts)}."


def _autocast(compute: Format, storage: Format, trainable: Format, kept: bool) -> Choice[bool]:
    if compute == "fp32":
        return Choice(False, "everything is fp32")
    if storage != compute or trainable != compute:
        return Choice(True, f"fp32 weights meet {compute} compute")
    if kept:
        return Choice(True, f"the weights that stay fp32 meet {compute} compute")
    return Choice(False, f"everything is {compute}")


def _grad_scaler(compute: Format) -> Choice[bool]:
    if compute == "fp16":
        return Choice(True, "small gradients underflow in fp16")
    return Choice(False, f"{compute} has the range of fp32" if compute == "bf16" else "fp32 does not underflow")


def _optimizer_state(section: PrecisionSection, trainable: Choice[Format]) -> Choice[Format]:
    if section.optimizer_state == "auto":
        return Choice(trainable.value, "moments follow the trainable weights")
    return Choice(section.optimizer_state, "asked for (precision.optimizer_state)")


def _saved(compute: Format, trainable: Format, full: bool) -> Choice[Format]:
    if not full:
        return Choice(trainable, "the adapter is saved as it was trained")
    if compute == "fp32":
        return Choice("fp32", "the model is saved as it was trained")
    return Choice(compute, "the dtype that the model computes in; config.json says the same")


def _has_tf32(hardware: Hardware) -> bool:
    return all((device.capability or (0, 0)) >= _TF32_CAPABILITY for device in hardware.devices)


def _tf32(section: PrecisionSection, hardware: Hardware, compute: Format) -> Choice[bool]:
    if not _has_tf32(hardware):
        return Choice(False, "the device has no TF32 (CUDA, compute capability 8.0)")
    if section.tf32 != "auto":
        return Choice(section.tf32, "asked for (precision.tf32)")
    if compute == "fp32":
        return Choice(False, "fp32 was planned, and TF32 keeps only 10 bits of it")
    return Choice(True, "what is left in fp32 beside half-precision compute may run in TF32")


def _tf32_warnings(section: PrecisionSection, hardware: Hardware) -> tuple[str, ...]:
    if section.tf32 is True and not _has_tf32(hardware):
        return ("precision.tf32 has no effect: the device has no TF32 (CUDA, compute capability 8.0).",)
    return ()


def _family_warnings(compute: _Compute, facts: ModelFacts) -> tuple[str, ...]:
    """What this checkpoint does not like about the compute dtype."""
    if compute.value == "fp16" and overflows_in_fp16(facts):
        return (
            f"{facts.model_type} was trained in bf16 and is known to overflow in fp16 (inf or NaN in activations); "
            "precision: fp32 is safe on this device.",
        )
    stored = set(facts.stored.values()) or {facts.dtype}
    wide = " and ".join(sorted(one for one in stored - {"fp16"} if one))
    if compute.value == "fp16" and wide and not facts.quantization:
        said = "weights above fp16's 65,504 are refused on load, and tiny ones become 0"
        return (f"The checkpoint has the range of {wide}: {said}.",)
    if compute.value == "bf16" and facts.dtype == "fp16":
        return ("The checkpoint is fp16: computing in bf16 drops 3 of its 10 mantissa bits.",)
    return ()


def _master_warnings(trainable: Format, state: Format) -> tuple[str, ...]:
    warnings = []
    if trainable == "bf16":
        warnings.append(
            "Trainable weights are pinned to bf16: updates smaller than 1/256 of a weight are rounded away, "
            "and training can stall."
        )
    if state == "bf16":
        warnings.append("AdamW's moments in bf16 can stall or spike training; precision.optimizer_state: fp32 is safe.")
    return tuple(warnings)


def _sentence(reason: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}."
