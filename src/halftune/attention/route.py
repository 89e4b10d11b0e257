"""The only place that chooses attention backends: from facts, with the reason for every one that was not taken."""

from __future__ import annotations

from collections.abc import Iterator

from halftune.attention.backends import (
    BACKENDS,
    FA4_BLACKWELL_HEAD_DIM,
    NO_ATTENTION,
    ON_REQUEST,
    OWN_ATTENTION,
    Backend,
)
from halftune.attention.contract import silent_hole
from halftune.attention.linear import route_linear, version_numbers
from halftune.attention.plan import AttentionPlan
from halftune.config.facts.model import ModelFacts
from halftune.config.sections.attention import AttentionSection
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.core.formats import Format
from halftune.hardware.facts import Device, Hardware


def route_attention(
    section: AttentionSection, hardware: Hardware, facts: ModelFacts, compute: Format, packing: bool
) -> AttentionPlan:
    """Chooses the backends of a run.

    Args:
        section: what was asked for.
        hardware: where it runs; every one of its devices must be able to.
        facts: the model: head size, soft-capping, sinks, dropout, linear layers.
        compute: dtype of attention, decided before.
        packing: whether rows hold several samples.

    Raises:
        PlanError: a backend was asked for that device, dtype or model rule out; names the ways out.
    """
    if facts.model_type in NO_ATTENTION:
        return _without_attention(section, hardware, facts)
    rejected: list[tuple[str, str]] = []
    chosen: Backend | None = None
    asked = section.backend
    for backend in (*BACKENDS, *ON_REQUEST):
        objection = "; ".join(objections(backend, hardware, facts, compute, packing))
        wanted = backend.name == asked if asked != "auto" else backend in BACKENDS
        if chosen is None and wanted and not objection:
            chosen = backend
        else:
            rejected.append((_label(backend), objection or _not_taken(backend, chosen, asked)))
    if chosen is None:
        raise _impossible(asked, rejected, facts, compute)
    varlen = chosen.varlen if packing else "none"
    linear = route_linear(section, hardware, facts)
    provider = "model" if facts.model_type in OWN_ATTENTION else chosen.provider
    return AttentionPlan(
        softmax=Choice(chosen.name, "asked for" if asked != "auto" else _why(chosen, hardware, facts, compute)),
        provider=Choice(provider, _PROVIDERS[provider]),
        varlen=Choice(varlen or "none", _VARLEN[varlen]),
        linear=linear.chosen,
        rejected=tuple(rejected),
        guard=section.guard,
        rejected_linear=linear.rejected,
    )


def _without_attention(section: AttentionSection, hardware: Hardware, facts: ModelFacts) -> AttentionPlan:
    """The routes of a model without softmax attention: transformers still wants a name for it, and eager it always has.

    Raises:
        PlanError: a backend was asked for, which would have nothing to do.
    """
    why = f"no layer of {facts.model_type} has softmax attention"
    linear = route_linear(section, hardware, facts)
    if section.backend not in ("auto", "eager"):
        what = f"{section.backend} is not possible: {why}"
        raise PlanError(what, where="attention", remedy="attention: auto")
    return AttentionPlan(
        softmax=Choice("eager", f"{why}: this is a name only"),
        provider=Choice("model", f"the layers of {facts.model_type} are code of its own"),
        varlen=Choice("none", why),
        linear=linear.chosen,
        rejected=tuple((_label(backend), why) for backend in (*BACKENDS, *ON_REQUEST) if backend.name != "eager"),
        guard=section.guard,
        rejected_linear=linear.rejected,
    )


_PROVIDERS = {
    "flash_attn": "the flash-attn package is installed",
    "torch": "torch brings the kernels",
    "transformers": "transformers' own integration",
    "model": "the model's own code, which the dtype guard does not see",
}
_VARLEN = {
    "none": "rows are not packed",
    "": "this backend masks packed rows",
    "segments": "one call per sample of a row: no work is spent across samples",
    "torch_varlen": "one call per row with the samples' boundaries",
    "flash_attn_varlen": "one call per row with the samples' boundaries",
}


def objections(
    backend: Backend, hardware: Hardware, facts: ModelFacts, compute: Format, packing: bool
) -> Iterator[str]:
    """Every reason against a backend; none means that it can be used."""
    for device in dict.fromkeys(hardware.devices):
        yield from _device_objections(backend, device, facts)
    if backend.package and hardware.version(backend.package) is None:
        yield f"{backend.package} is not installed"
    if backend.torch and _older(hardware.version("torch"), backend.torch):
        yield f"needs torch {backend.torch}, this is {hardware.version('torch') or 'none'}"
    if compute not in backend.dtypes:
        yield f"computes in {' and '.join(backend.dtypes)} only, the plan is {compute}"
    yield from _model_objections(backend, facts)
    if packing and not (backend.varlen and facts.model_type not in OWN_ATTENTION):
        yield "no path for packed rows"


def _device_objections(backend: Backend, device: Device, facts: ModelFacts) -> Iterator[str]:
    if device.kind not in backend.kinds:
        yield f"runs on {' and '.join(kind.upper() for kind in backend.kinds)} only"
        return
    if device.capability is None:
        return
    shown = f"{device.name} has {_dotted(device.capability)}"
    if device.capability < backend.capability:
        yield f"needs compute capability {_dotted(backend.capability)}, {shown}"
    elif backend.majors and device.capability[0] not in backend.majors:
        yield f"has a backward pass for compute capability {', '.join(f'{m}.x' for m in backend.majors)}, {shown}"
    if backend.name == "fa2" and silent_hole(device.capability, facts.head_dim, facts.attention_dropout):
        yield f"head size {facts.head_dim} with dropout leaves gradients unwritten on {device.name}, without an error"
    blackwell = backend.name == "fa4" and device.capability[0] in (10, 11)
    if blackwell and facts.head_dim > FA4_BLACKWELL_HEAD_DIM and facts.head_dim != backend.max_head_dim:
        yield f"{device.name} has head sizes up to {FA4_BLACKWELL_HEAD_DIM} and 256, this model {facts.head_dim}"


def _model_objections(backend: Backend, facts: ModelFacts) -> Iterator[str]:
    if facts.model_type in OWN_ATTENTION and backend.name != "eager":
        yield f"{facts.model_type} computes attention in code of its own"
    if facts.head_dim > backend.max_head_dim:
        yield f"head size {facts.head_dim} is over {backend.max_head_dim}"
    elif facts.head_dim % backend.head_dim_multiple:
        yield f"head size {facts.head_dim} is no multiple of {backend.head_dim_multiple}"
    if facts.softcap is not None and not backend.softcap:
        yield "cannot cap attention logits, which this model does"
    if facts.softcap is not None and facts.attention_dropout > 0 and backend.name == "fa2":
        yield "has no dropout together with logit capping"
    if facts.sinks and not backend.sinks:
        yield "has no attention sinks, which this model learned"
    if facts.attention_dropout > 0 and not backend.dropout:
        yield f"has no attention dropout, which this model trains with ({facts.attention_dropout:g})"


def _impossible(asked: str, rejected: list[tuple[str, str]], facts: ModelFacts, compute: Format) -> PlanError:
    """Names both sides of the conflict and the three ways out."""
    own = [(label, reason) for label, reason in rejected if asked in ("auto", label.partition(" ")[0])]
    why = own[0][1] if len(own) == 1 else " / ".join(f"{label}: {reason}" for label, reason in own)
    what = f"{asked} is not possible: {why}"
    if asked.startswith("fa") and compute == "fp32":
        what = f"{asked} and precision: {compute} exclude each other: {why}"
    return PlanError(what, where="attention", remedy=_ways_out(asked, why, facts, compute))


def _ways_out(asked: str, why: str, facts: ModelFacts, compute: str) -> str:
    safe = "attention: eager (any device, dtype and model; slow)" if facts.sinks or facts.softcap else "attention: sdpa"
    if asked.startswith("fa") and compute == "fp32":
        return f"attention: auto, {safe}, or precision: bf16 (fp16 on GPUs before Ampere)"
    if "compute capability" in why or "runs on" in why:
        return f"attention: auto, {safe}, or a device that can"
    if "no path for packed rows" in why:
        return f"data.packing: false, attention: auto, or {safe}"
    if "is not installed" in why:
        return f"install it, attention: auto, or {safe}"
    return f"attention: auto, {safe}, or another model"


def _not_taken(backend: Backend, chosen: Backend | None, asked: str) -> str:
    if asked != "auto" and backend.name != asked:
        return f"{asked} was asked for"
    if backend in ON_REQUEST:
        return "taken on request only"
    assert chosen is not None
    return f"{_label(chosen)} comes first"


def _why(chosen: Backend, hardware: Hardware, facts: ModelFacts, compute: Format) -> str:
    kind = hardware.kind
    if chosen.name == "fa2":
        return f"the fastest for {compute} on {hardware.devices[0].name}"
    if chosen.name == "sdpa":
        carries = kind == "cuda" and compute != "fp32" and all(_ampere(device) for device in hardware.devices)
        return (
            "torch's own, which carries FlashAttention kernels" if carries else f"the fastest for {compute} on {kind}"
        )
    if facts.model_type in OWN_ATTENTION:
        return f"{facts.model_type} computes attention in code of its own"
    need = "attention sinks" if facts.sinks else "logit capping"
    return f"the fastest with {need}" if chosen.name == "flex" else f"the only one with {need} on {kind}"


def _ampere(device: Device) -> bool:
    return (device.capability or (0, 0)) >= (8, 0)


def _label(backend: Backend) -> str:
    """``fa2`` has two providers, which are told apart."""
    return f"{backend.name} ({backend.provider})" if backend.name == "fa2" else backend.name


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _older(version: str | None, than: str) -> bool:
    return version is None or version_numbers(version) < version_numbers(than)
