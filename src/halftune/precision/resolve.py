"""Decides every dtype of a run from facts, before any weight is read, and which parameters stay fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from halftune.config.facts.model import ModelFacts
from halftune.config.sections.model import AdapterSection, LoraAdapter, NoAdapter, PrecisionSection
from halftune.config.weight_formats import format_of, refusal
from halftune.core.choice import Choice, Format, StateFormat
from halftune.core.errors import PlanError
from halftune.hardware import Device, Hardware
from halftune.precision import TRAINED_FLOAT8, PrecisionPlan
from halftune.precision.truth_table import Rounding, Row, describe, roundings, row_of

_STATE = (r"(^|\.)A_log$", r"(^|\.)dt_bias$")  # decay of a recurrence: errors grow with every token
# Small, and the choice of experts is sensitive to rounding: trained and saved in fp32. Under autocast their matmul runs
# in the compute dtype, unless the model's code disables autocast.
_ROUTER = (r"(^|\.)(gate|router)\.(weight|bias)$", r"e_score_correction_bias$")


def keep_fp32(facts: ModelFacts) -> tuple[tuple[str, ...], str]:
    """Return the patterns of parameters that stay fp32, and the reason."""
    patterns: tuple[str, ...] = ()
    reasons = []
    if facts.linear_layers:
        patterns += _STATE
        reasons.append("errors in recurrent decays accumulate over the sequence")
    if facts.num_experts:
        patterns += _ROUTER
        reasons.append("routers are trained and saved in fp32 (under autocast their matmul uses the compute dtype)")
    if facts.family.keep_fp32:
        patterns += facts.family.keep_fp32
        reasons.append(facts.family.why_fp32 or f"{facts.model_type} defines them in fp32")
    return patterns, "; ".join(reasons) or "not needed in this family"


_TF32_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class _Compute:
    """The compute dtype with its reason, the device that decided, and warnings for the user."""

    value: Format
    reason: str
    device: Device
    warnings: tuple[str, ...] = ()


def resolve_precision(
    section: PrecisionSection, hardware: Hardware, facts: ModelFacts, adapter: AdapterSection
) -> PrecisionPlan:
    """Return the plan of all dtypes, each with its reason.

    Args:
        section: the requested dtypes.
        hardware: the machine; the weakest of several devices decides.
        facts: the model.
        adapter: ``none`` trains every weight, or freezes some; an adapter freezes the base.

    Raises:
        PlanError: the device does not support a requested dtype, or two requests are incompatible.
    """
    full = adapter.type == "none"
    compute = _compute(section, hardware, full, facts)
    _check(section, compute, facts, full)
    trainable = _trainable(section, compute, full)
    patterns, why_fp32 = keep_fp32(facts)
    frozen = not isinstance(adapter, NoAdapter) or adapter.is_partial
    storage = _storage(compute, trainable, facts, not frozen, patterns)
    kept = Choice(patterns, why_fp32)
    state = _optimizer_state(section, trainable)
    linear, fallen = _linear(section, hardware, compute.value, facts, adapter)
    return PrecisionPlan(
        storage=storage,
        trainable=trainable,
        compute=Choice(compute.value, compute.reason),
        autocast=_autocast(compute.value, storage.value, trainable.value, bool(patterns)),
        grad_scaler=_grad_scaler(compute.value),
        reduce=Choice(trainable.value, "gradients have the dtype of their weights"),
        optimizer_state=state,
        saved=_saved(compute.value, trainable.value, full),
        keep_fp32=kept,
        tf32=_tf32(section, hardware, compute.value),
        linear=linear,
        experts=_experts(compute, storage.value) if facts.num_experts else None,
        warnings=(
            *compute.warnings,
            *fallen,
            *_family_warnings(compute, facts),
            *_mixed_warnings(storage.value, facts, patterns),
            *_master_warnings(trainable.value, state.value),
            *_tf32_warnings(section, hardware),
        ),
    )


def frozen_precision(plan: PrecisionPlan, adapter: Format | None) -> PrecisionPlan:
    """Return the plan for inference: nothing is trained, and an adapter keeps the format of its file.

    Args:
        plan: the plan of :func:`resolve_precision` for an adapter on a frozen model.
        adapter: the adapter's stored format; None for a full model. An adapter in another format than the compute dtype
            is cast to fp32.
    """
    compute = plan.compute.value
    trainable: Format = compute if adapter is None else adapter if adapter == compute else "fp32"
    nothing = "inference only"
    return replace(
        plan,
        trainable=Choice(trainable, "the adapter's stored format" if trainable == adapter else nothing),
        autocast=_autocast(compute, plan.storage.value, trainable, bool(plan.keep_fp32.value)),
        grad_scaler=Choice(False, nothing),
        saved=plan.saved if adapter is not None else _saved(compute, trainable, full=True),
    )


def asked_compute(section: PrecisionSection, hardware: Hardware, facts: ModelFacts, *, full: bool) -> Format:
    """Return the requested compute dtype, even if unsupported; for ``auto`` the chosen one."""
    return _compute(section, hardware, full, facts).value if section.compute == "auto" else section.compute


def _experts(compute: _Compute, storage: Format) -> Choice[str]:
    """How experts are multiplied: by ``grouped_mm``, which is one kernel on few devices."""
    cast = f": not covered by autocast, so {storage} weights are cast for it" if storage != compute.value else ""
    device = compute.device
    one = has_grouped_kernel(device.capability, compute.value) or device.kind not in ("cuda", "cpu")
    how = "one matmul for all experts" if one else "one matmul per expert, without a grouped kernel"
    return Choice(f"grouped_mm in {compute.value}", f"{how}{cast}; loops over experts use autocast")


def has_grouped_kernel(capability: tuple[int, int] | None, compute: str) -> bool:
    """Whether a CUDA device multiplies groups of rows by one kernel (torch's ``cuda/GroupedBlas.cpp``).

    Elsewhere torch multiplies group by group, and waits for their sizes on a GPU.
    """
    return capability is not None and capability[0] in (9, 10) and compute == "bf16"


def weakest(hardware: Hardware) -> tuple[Device, Row]:
    """Return the device that decides: lowest rank, then lowest compute capability."""
    device = min(hardware.devices, key=lambda device: (row_of(device).rank, device.capability or (0, 0)))
    return device, row_of(device)


def _compute(section: PrecisionSection, hardware: Hardware, full: bool, facts: ModelFacts) -> _Compute:
    device, row = weakest(hardware)
    named = describe(device)
    if len({other.name for other in hardware.devices}) > 1:
        named += f", the weakest of {len(hardware.devices)} devices,"
    auto, why = row.auto_full if full else row.auto, row.auto_reason.format(device=named)
    if auto == "fp16" and facts.family.overflows_fp16:
        auto, why = "fp32", f"{named} has no bf16, and {facts.model_type} is known to overflow in fp16"
    if section.compute == "auto":
        return _Compute(auto, why, device)
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
    what = f"{section.compute} is unavailable: {reason}"
    remedy = f"use precision: {others}, or precision: {{compute: {section.compute}, on_unsupported: fallback}}"
    raise PlanError(what, where="precision", remedy=remedy, code="precision.compute_unavailable")


def _linear(
    section: PrecisionSection, hardware: Hardware, compute: Format, facts: ModelFacts, adapter: AdapterSection
) -> tuple[Choice[str] | None, tuple[str, ...]]:
    """The format of linear layers, if it is not the compute dtype; and a warning if it fell back to that."""
    if section.linear == "auto":
        return None, ()
    device, row = weakest(hardware)
    reason = row.fp8.reason.format(device=describe(device))
    full = isinstance(adapter, NoAdapter)
    plain = full or (isinstance(adapter, LoraAdapter) and not adapter.use_dora and not adapter.reduces_base)
    shapes = [one.shape for one in facts.likely_tensors if one.kind == "linear" and one.layers]
    wrong = {
        "float8 products are of frozen weights under LoRA (without DoRA, PiSSA and OLoRA), or of full fine-tuning": (
            not plain
        ),
        f"products of float8 rows give bf16, and compute is {compute}": compute != "bf16",
        f"the checkpoint is quantised already ({facts.quantization})": format_of(facts.quantization).bytes_per_param
        is not None,
        reason: row.fp8.answer != "yes",
        "no linear layer has sizes that are multiples of 16": bool(shapes)
        and not any(side % 16 == 0 == other % 16 for side, other in shapes),
    }
    why = next((what for what, found in wrong.items() if found), "")
    if not why:
        return Choice(TRAINED_FLOAT8 if full else "fp8", reason), ()
    if section.on_unsupported == "fallback":
        return None, (_sentence(f"fp8 was asked for linear layers, but {why}; they compute in {compute}"),)
    what = f"fp8 is unavailable for linear layers: {why}"
    remedy = "precision.linear: auto, or precision.on_unsupported: fallback"
    raise PlanError(what, where="precision.linear", remedy=remedy, code="precision.compute_unavailable")


def _check(section: PrecisionSection, compute: _Compute, facts: ModelFacts, full: bool) -> None:
    """Raise PlanError for incompatible requests."""
    if section.trainable == "bf16" and compute.value != "bf16":
        why = {
            "fp16": "fp16's loss scaler requires fp32 weights (torch cannot unscale half gradients)",
            "fp32": "bf16 weights would already have lost the precision of fp32 compute",
        }[compute.value]
        what = f"trainable weights in bf16 are incompatible with {compute.value} compute: {why}"
        remedy = "use precision.trainable: auto, or precision.compute: bf16"
        raise PlanError(what, where="precision.trainable", remedy=remedy, code="precision.trainable_conflict")
    row = format_of(facts.quantization)
    if not row.on_load and (unknown := refusal(facts.quantization)):
        remedy = "use the original bf16 or fp16 checkpoint, or one quantised by bitsandbytes"
        raise PlanError(unknown, where="model.name_or_path", remedy=remedy, code="model.quantization_unknown")
    if full and not row.trainable:
        what, remedy = "the checkpoint is quantised", "a checkpoint that is not quantised"
        if row.on_load:
            what, remedy = "the weights are quantised on load", "model.quantization: none"
        what = f"{what} ({facts.quantization}), and quantised weights cannot be trained"
        raise PlanError(
            what, where="adapter", remedy=f"use adapter: lora, or {remedy}", code="precision.quantised_not_trainable"
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
        return Choice("fp32", f"fp16's loss scaler requires fp32 {what}")
    return Choice("fp32", f"{what} in fp32 keep updates that bf16 would round away")


def _storage(
    compute: _Compute, trainable: Choice[Format], facts: ModelFacts, full: bool, kept: tuple[str, ...]
) -> Choice[Format]:
    value = trainable.value if full else compute.value
    reason = "full fine-tuning loads the master weights" if full else "frozen in the compute dtype"
    return Choice(value, "; ".join([reason, *_on_load(value, facts, kept)]))


def _on_load(value: Format, facts: ModelFacts, kept: tuple[str, ...]) -> Iterator[str]:
    """What becomes of the checkpoint's weights when they are read as ``value``."""
    stored = facts.dtype
    if facts.quantization and not format_of(facts.quantization).package:
        yield f"the checkpoint's {facts.quantization} weights are dequantised to it on load"
    elif facts.quantization:
        yield f"the {facts.quantization} weights stay quantised and are multiplied in it"
    elif _is_mixed(facts):
        rounded = [_rounded(one, facts) for one in roundings(facts.stored, value, kept)]
        yield from rounded or ["no tensor is rounded on load"]
    elif stored not in (None, value):
        change = "rounded" if value != "fp32" or stored == "fp64" else "widened without loss"
        yield f"the checkpoint's {stored} is {change} on load"
        if value == "fp16":
            yield "a weight above 65,504 is an error"


def _is_mixed(facts: ModelFacts) -> bool:
    return len(set(facts.stored.values())) > 1 and not facts.quantization


def _rounded(one: Rounding, facts: ModelFacts) -> str:
    """Describe the tensors of one format that loading rounds."""
    return (
        f"{len(one.names)} of {len(facts.stored)} tensors are {one.source} in the checkpoint and rounded to "
        f"{one.target} on load, first {one.names[0]}"
    )


def _mixed_warnings(storage: Format, facts: ModelFacts, kept: tuple[str, ...]) -> Iterator[str]:
    """Yield a warning for each format that loading rounds in a checkpoint with mixed formats."""
    for one in roundings(facts.stored, storage, kept) if _is_mixed(facts) else ():
        yield f"{_rounded(one, facts)}."


def _autocast(compute: Format, storage: Format, trainable: Format, kept: bool) -> Choice[bool]:
    if compute == "fp32":
        return Choice(False, "all dtypes are fp32")
    if storage != compute or trainable != compute:
        return Choice(True, f"fp32 weights with {compute} compute")
    if kept:
        return Choice(True, f"some weights stay fp32 with {compute} compute")
    return Choice(False, f"all dtypes are {compute}")


def _grad_scaler(compute: Format) -> Choice[bool]:
    if compute == "fp16":
        return Choice(True, "small gradients underflow in fp16")
    return Choice(False, f"{compute} has the range of fp32" if compute == "bf16" else "fp32 does not underflow")


def _optimizer_state(section: PrecisionSection, trainable: Choice[Format]) -> Choice[StateFormat]:
    if section.optimizer_state == "auto":
        return Choice(trainable.value, "moments have the dtype of the trainable weights")
    return Choice(section.optimizer_state, "asked for (precision.optimizer_state)")


def _saved(compute: Format, trainable: Format, full: bool) -> Choice[Format]:
    if not full:
        return Choice(trainable, "the adapter's training dtype")
    if compute == "fp32":
        return Choice("fp32", "the model's training dtype")
    return Choice(compute, "the compute dtype; config.json records it")


def _has_tf32(hardware: Hardware) -> bool:
    return all((device.capability or (0, 0)) >= _TF32_CAPABILITY for device in hardware.devices)


def _tf32(section: PrecisionSection, hardware: Hardware, compute: Format) -> Choice[bool]:
    if not _has_tf32(hardware):
        return Choice(False, "the device has no TF32 (requires CUDA, compute capability ≥ 8.0)")
    if section.tf32 != "auto":
        return Choice(section.tf32, "asked for (precision.tf32)")
    if compute == "fp32":
        return Choice(False, "fp32 compute, and TF32 has only 10 mantissa bits")
    return Choice(True, "remaining fp32 matmuls may use TF32")


def _tf32_warnings(section: PrecisionSection, hardware: Hardware) -> tuple[str, ...]:
    if section.tf32 is True and not _has_tf32(hardware):
        return ("precision.tf32 has no effect: the device has no TF32 (requires CUDA, compute capability ≥ 8.0).",)
    return ()


def _family_warnings(compute: _Compute, facts: ModelFacts) -> tuple[str, ...]:
    """Warnings about this checkpoint with the compute dtype."""
    if compute.value == "fp16" and facts.family.overflows_fp16:
        return (
            f"{facts.model_type} was trained in bf16 and is known to overflow in fp16 (inf or NaN in activations); "
            "precision: fp32 is safe on this device.",
        )
    stored = set(facts.stored.values()) or {facts.dtype}
    wide = " and ".join(sorted(one for one in stored - {"fp16"} if one))
    if compute.value == "fp16" and wide and not facts.quantization:
        said = "weights above 65,504 are refused on load, and tiny ones become 0"
        return (f"The checkpoint is {wide}, and compute is fp16: {said}.",)
    if compute.value == "bf16" and facts.dtype == "fp16":
        return ("The checkpoint is fp16: computing in bf16 drops 3 of its 10 mantissa bits.",)
    return ()


def _master_warnings(trainable: Format, state: StateFormat) -> tuple[str, ...]:
    warnings = []
    if trainable == "bf16":
        warnings.append(
            "Trainable weights are bf16: updates smaller than 1/256 of a weight are rounded away, "
            "and training can stall."
        )
    if state == "bf16":
        warnings.append("AdamW's moments in bf16 can stall or spike training; precision.optimizer_state: fp32 is safe.")
    return tuple(warnings)


def _sentence(reason: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}."
