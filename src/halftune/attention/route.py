"""Chooses the attention backends of a run, with the reason against every other one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from halftune.attention.backends import BACKENDS, FA4_BLACKWELL_HEAD_DIM, Backend
from halftune.attention.contract import AttentionPlan, LinearRoute, lacks_backward
from halftune.config.facts.model import ModelFacts
from halftune.config.sections.model import AttentionSection
from halftune.core.choice import ASKED, Choice, Format
from halftune.core.errors import PlanError
from halftune.hardware import Device, Hardware, version_numbers

_PROVIDERS = {
    "flash_attn": "the flash-attn package is installed",
    "flash_attn_3": "the flash-attn-3 package is installed",
    "flash_attn_4": "the flash-attn-4 package is installed",
    "torch": "torch includes the kernels",
    "transformers": "transformers' own integration",
    "model": "the model's own code, outside the dtype guard",
}
_ONE_CALL = "one call per row with sample boundaries"
_VARLEN = {
    "none": "rows are not packed",
    "": "packed rows are masked",
    "segments": "one call per sample: no computation across samples",
    "block_mask": "one call per row with a block mask of the samples",
    **dict.fromkeys(("torch_varlen", "flash_attn_varlen", "flash_attn_3_varlen", "flash_attn_4_varlen"), _ONE_CALL),
}
_CLASS_FLAG = {"sdpa": "sdpa", "flex": "flex", "eager": ""}  # flash for all others


def route_attention(
    section: AttentionSection, hardware: Hardware, facts: ModelFacts, compute: Format, packing: bool
) -> AttentionPlan:
    """Choose the backends of a run.

    Args:
        section: the requested backends.
        hardware: the machine; a backend must support all of its devices.
        facts: the model: head size, soft-capping, sinks, dropout, linear layers.
        compute: dtype of attention.
        packing: whether rows contain several samples.

    Raises:
        PlanError: the requested backend does not support the device, dtype or model.
    """
    if facts.family.attention == "none":
        return _without_attention(section, hardware, facts)
    chosen, rejected = _choose(section.backend, hardware, facts, compute, packing)
    why = _why(chosen, hardware, facts, compute) if section.backend == "auto" else ASKED
    varlen = chosen.varlen if packing else "none"
    linear = linear_backend(section, hardware, facts)
    provider = "model" if facts.family.attention == "own" else chosen.provider
    return AttentionPlan(
        softmax=Choice(chosen.name, why),
        provider=Choice(provider, _PROVIDERS[provider]),
        varlen=Choice(varlen or "none", _VARLEN[varlen]),
        linear=linear.chosen,
        rejected=tuple((_label(backend), _joined(reasons)) for backend, reasons in rejected.items()),
        guard=section.guard,
        rejected_linear=linear.rejected,
    )


def _choose(
    asked: str, hardware: Hardware, facts: ModelFacts, compute: Format, packing: bool
) -> tuple[Backend, dict[Backend, list[Objection]]]:
    """The first backend that nothing speaks against, and the reasons against all others.

    Raises:
        PlanError: there is none.
    """
    against = {one: list(objections(one, hardware, facts, compute, packing)) for one in BACKENDS}
    usable = (one for one, reasons in against.items() if not reasons)
    chosen = next((one for one in usable if _may_choose(one, asked, hardware)), None)
    for one, reasons in against.items():
        if not reasons and one is not chosen:
            reasons.append(_why_rejected(one, chosen, asked, hardware))
    if chosen is None:
        raise _unavailable(asked, against, facts, compute)
    del against[chosen]
    return chosen, against


def linear_backend(section: AttentionSection, hardware: Hardware, facts: ModelFacts) -> LinearRoute:
    """Choose the backend of the linear-attention layers; ``none`` if the model has no such layer.

    Raises:
        PlanError: the requested backend does not support this model's layers on this machine.
    """
    if not facts.linear_layers:
        return LinearRoute(Choice("none", "every layer has softmax attention"), ())
    from halftune.attention.linear import route_linear  # the operators' requirements

    return route_linear(section, hardware, facts)


def _without_attention(section: AttentionSection, hardware: Hardware, facts: ModelFacts) -> AttentionPlan:
    """The plan of a model without softmax attention: transformers still requires a name, and always has eager.

    Raises:
        PlanError: a backend was requested that would never be called.
    """
    why = f"no layer of {facts.model_type} has softmax attention"
    linear = linear_backend(section, hardware, facts)
    if section.backend not in ("auto", "eager"):
        what = f"{section.backend} is unavailable: {why}"
        raise PlanError(what, where="attention", remedy="use attention: auto", code="attention.backend_unavailable")
    return AttentionPlan(
        softmax=Choice("eager", f"{why}: placeholder"),
        provider=Choice("model", f"{facts.model_type} has its own layer code"),
        varlen=Choice("none", why),
        linear=linear.chosen,
        rejected=tuple((_label(backend), why) for backend in BACKENDS if backend.name != "eager"),
        guard=section.guard,
        rejected_linear=linear.rejected,
    )


class Objection(NamedTuple):
    """A reason against a backend; ``kind`` decides the remedy."""

    kind: Literal["device", "missing", "dtype", "model", "packed", "choice"]
    text: str


def _joined(found: Iterable[Objection]) -> str:
    return "; ".join(one.text for one in found)


def objections(
    backend: Backend, hardware: Hardware, facts: ModelFacts, compute: Format, packing: bool
) -> Iterator[Objection]:
    """Yield every reason against a backend; nothing if it can be used."""
    for device in dict.fromkeys(hardware.devices):
        yield from _device_objections(backend, device, facts)
    if backend.package and hardware.version(backend.package) is None:
        yield Objection("missing", f"{backend.package} is not installed")
    if backend.torch and _older(hardware.version("torch"), backend.torch):
        installed = hardware.version("torch") or "none"
        yield Objection("model", f"requires torch ≥ {backend.torch} (installed: {installed})")
    if compute not in backend.dtypes:
        yield Objection("dtype", f"supports {' and '.join(backend.dtypes)} only (plan: {compute})")
    yield from (Objection("model", text) for text in _model_objections(backend, facts))
    if packing and not (backend.varlen and facts.family.attention != "own"):
        yield Objection("packed", "does not support packed rows")


def _device_objections(backend: Backend, device: Device, facts: ModelFacts) -> Iterator[Objection]:
    if device.kind not in backend.kinds:
        yield Objection("device", f"runs on {' and '.join(kind.upper() for kind in backend.kinds)} only")
        return
    if device.capability is None:
        return
    shown = f"({device.name}: {_dotted(device.capability)})"
    if device.capability < backend.capability:
        yield Objection("device", f"requires compute capability ≥ {_dotted(backend.capability)} {shown}")
    elif backend.majors and device.capability[0] not in backend.majors:
        yield Objection("device", f"trains on compute capability {_majors(backend.majors)} only {shown}")
    yield from (Objection("model", text) for text in _head_objections(backend, device.name, device.capability, facts))


def _head_objections(backend: Backend, device: str, capability: tuple[int, int], facts: ModelFacts) -> Iterator[str]:
    """Head sizes that a kernel lacks on some devices."""
    if backend.name == "fa2" and lacks_backward(capability, facts.head_dim, facts.attention_dropout):
        yield f"no backward kernel for head size {facts.head_dim} with dropout on {device}"
    blackwell = backend.name == "fa4" and capability[0] in (10, 11)
    if blackwell and facts.head_dim > FA4_BLACKWELL_HEAD_DIM and facts.head_dim != backend.max_head_dim:
        yield f"supports head sizes ≤ {FA4_BLACKWELL_HEAD_DIM} and 256 on {device} (model: {facts.head_dim})"


def _model_objections(backend: Backend, facts: ModelFacts) -> Iterator[str]:
    if facts.family.attention == "own" and backend.name != "eager":
        yield f"{facts.model_type} has its own attention code"
    elif _CLASS_FLAG.get(backend.name, "flash") in facts.attention_lacks:
        yield f"transformers' class of {facts.model_type} does not support it"
    elif backend.kernel and "windows" in facts.attention_lacks:
        yield f"the window is lost: transformers' class of {facts.model_type} has it in masks only"
    elif backend.kernel and "windows_unchecked" in facts.attention_lacks:
        yield f"whether the windows of {facts.model_type} are kept is not known: no small copy runs"
    if facts.head_dim > backend.max_head_dim:
        yield f"head size {facts.head_dim} exceeds {backend.max_head_dim}"
    elif facts.head_dim % backend.head_dim_multiple:
        yield f"head size {facts.head_dim} is not a multiple of {backend.head_dim_multiple}"
    yield from _missing_features(backend, facts)


def _missing_features(backend: Backend, facts: ModelFacts) -> Iterator[str]:
    capped, dropout = facts.softcap is not None, facts.attention_dropout
    if capped and not backend.softcap:
        yield "does not support logit soft-capping, which this model uses"
    if capped and dropout > 0 and backend.name == "fa2":
        yield "does not support dropout with logit soft-capping"
    if facts.sinks and not backend.sinks:
        yield "does not support attention sinks, which this model uses"
    if dropout > 0 and not backend.dropout:
        yield f"does not support attention dropout, which this model uses ({dropout:g})"


def _unavailable(
    asked: str, against: Mapping[Backend, Sequence[Objection]], facts: ModelFacts, compute: Format
) -> PlanError:
    """The error for a backend that cannot be used: the reasons, and what to change."""
    own = {one: found for one, found in against.items() if asked in ("auto", one.name)}
    several = (f"{_label(one)}: {_joined(found)}" for one, found in own.items())
    why = _joined(*own.values()) if len(own) == 1 else " / ".join(several)
    what = f"{asked} is unavailable: {why}"
    if asked.startswith("fa") and compute == "fp32":
        what = f"{asked} does not support precision: {compute}: {why}"
    kinds = {each.kind for found in own.values() for each in found}
    return PlanError(
        what, where="attention", remedy=_remedy(asked, kinds, facts, compute), code="attention.backend_unavailable"
    )


def _remedy(asked: str, kinds: Collection[str], facts: ModelFacts, compute: str) -> str:
    safe = "attention: eager (any device, dtype and model; slow)" if facts.sinks or facts.softcap else "attention: sdpa"
    if asked.startswith("fa") and compute == "fp32":
        return f"use attention: auto, {safe}, or precision: bf16 (fp16 on GPUs before Ampere)"
    if "device" in kinds:
        return f"use attention: auto, {safe}, or a supported device"
    if "packed" in kinds:
        return f"set data.packing: false, attention: auto, or {safe}"
    if "missing" in kinds:
        return f"install it, use attention: auto, or {safe}"
    return f"use attention: auto, {safe}, or another model"


def _may_choose(backend: Backend, asked: str, hardware: Hardware) -> bool:
    return _by_itself(backend, hardware) if asked == "auto" else backend.name == asked


def _by_itself(backend: Backend, hardware: Hardware) -> bool:
    """Whether `auto` may choose a backend on all devices."""
    return not backend.auto or all((one.capability or (0, 0))[0] in backend.auto for one in hardware.devices)


def _why_rejected(backend: Backend, chosen: Backend | None, asked: str, hardware: Hardware) -> Objection:
    if asked != "auto" and backend.name != asked:
        return Objection("choice", f"{asked} was asked for")
    if not _by_itself(backend, hardware):
        return Objection("device", f"used on request only, except on compute capability {_majors(backend.auto)}")
    assert chosen is not None
    return Objection("choice", f"{_label(chosen)} is preferred")


def _why(chosen: Backend, hardware: Hardware, facts: ModelFacts, compute: Format) -> str:
    kind = hardware.kind
    if chosen.name in ("fa2", "fa3", "fa4"):
        return f"the fastest for {compute} on {hardware.devices[0].name}"
    if chosen.name == "sdpa":
        flash = kind == "cuda" and compute != "fp32" and all(_ampere(device) for device in hardware.devices)
        return "torch's sdpa, with FlashAttention kernels" if flash else f"the fastest for {compute} on {kind}"
    if facts.family.attention == "own":
        return f"{facts.model_type} has its own attention code"
    need = "attention sinks" if facts.sinks else "logit soft-capping"
    return f"the fastest with {need}" if chosen.name == "flex" else f"the only one with {need} on {kind}"


def _ampere(device: Device) -> bool:
    return (device.capability or (0, 0)) >= (8, 0)


def _label(backend: Backend) -> str:
    """The backend's name, with its provider for ``fa2``, which has two."""
    return f"{backend.name} ({backend.provider})" if backend.name == "fa2" else backend.name


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _majors(numbers: Iterable[int]) -> str:
    return ", ".join(f"{number}.x" for number in numbers)


def _older(version: str | None, than: str) -> bool:
    return version is None or version_numbers(version) < version_numbers(than)
