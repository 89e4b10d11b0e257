"""Chooses the backend of linear-attention, state-space and convolution layers, with reasons."""

from __future__ import annotations

import os
from pathlib import Path

import halftune_kernels
from halftune.attention.backends import LINEAR_MISCOMPILES, LINEAR_PACKAGES
from halftune.attention.contract import LinearRoute
from halftune.config.facts.families import OWN
from halftune.config.facts.model import ModelFacts
from halftune.config.sections.model import AttentionSection
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.hardware import Hardware, version_numbers
from halftune_kernels.gate import OLDEST_TRITON, Row, rows_for

# Keys of config.json for head sizes that our operators limit; of each tuple, the first that is set applies.
_HEAD_SIZES: dict[str, tuple[tuple[str, ...], ...]] = {
    "gated_delta_rule": (("linear_key_head_dim",), ("linear_value_head_dim",)),
    "kda": (("linear_head_dim", "head_dim"),),
    "ssd": (("mamba_d_state", "ssm_state_size", "state_size"),),
    "rwkv7": (("head_dim",),),
}
_LARGEST_HEAD = 256
# Values of HALFTUNE_KERNELS: halftune_kernels.dispatch.NAMES, whose import would import torch, and auto.
IMPLEMENTATIONS = ("triton", "torch", "cpu", "reference", "auto")
_PREFIX = "HALFTUNE_KERNELS_"  # followed by an operator's name in capitals
_OPERATORS = ("causal_conv1d", "gated_rms_norm", "ssd", "gated_delta_rule", "kda", "rwkv7")  # as in `dispatch`
_OLDEST_FLA = (0, 2, 2)  # transformers silently ignores older versions


def route_linear(section: AttentionSection, hardware: Hardware, facts: ModelFacts) -> LinearRoute:
    """Choose the backend of the linear-attention layers.

    Args:
        section: the requested backend (``attention.linear``).
        hardware: the machine.
        facts: the model.

    Raises:
        PlanError: the requested backend does not support this model's layers on this machine.
    """
    if not facts.linear_layers:
        return LinearRoute(Choice("none", "every layer has softmax attention"), ())
    own, fla, slow = _own_objection(facts), _fla_objection(hardware, facts), _slow(hardware, facts)
    if facts.model_type in OWN:
        fla = "halftune's own model code calls halftune's operators"
    torch = f"transformers does not support {facts.model_type}" if facts.model_type in OWN else ""
    objections = {"halftune": own, "fla": fla, "torch": torch}
    if own and torch:
        what = f"no backend for the layers of {facts.model_type}: {own}; {torch}"
        raise PlanError(what, code="attention.backend_unavailable")
    asked = section.linear
    if asked != "auto" and objections[asked]:
        remedy = "use attention: {linear: auto}" + ("" if torch else " or {linear: torch}")
        way = ", or install it" if "not installed" in fla else ", or another Triton version or device"
        what = f"{asked} is unavailable: {objections[asked]}"
        raise PlanError(
            what,
            where="attention.linear",
            remedy=remedy + (way if asked == "fla" else ""),
            code="attention.backend_unavailable",
        )
    if asked != "auto":
        chosen, why = asked, "asked for"
    elif not own and (fla or not slow):
        chosen, why = "halftune", _speed(hardware, facts, slow)
    elif not fla:
        chosen, why = "fla", f"flash-linear-attention is installed; halftune: {own or slow}"
    else:
        chosen, why = "torch", f"transformers' own code; halftune: {own}; fla: {fla}"
    if chosen == "halftune" and (environment := asked_by_environment(hardware, facts)):
        why = f"halftune's operators, {', '.join(dict.fromkeys(environment.values()))}"
    left = [(name, why_not or _why_rejected(name, chosen, asked)) for name, why_not in objections.items()]
    return LinearRoute(Choice(chosen, why), tuple(entry for entry in left if entry[0] != chosen))


def asked_by_environment(hardware: Hardware, facts: ModelFacts) -> dict[str, str]:
    """Return ``VARIABLE=value`` for each operator whose implementation an environment variable sets.

    Raises:
        PlanError: a variable has an unknown value or operator, or requests Triton on a CPU.
    """
    asked = {}
    for variable in sorted(name for name in os.environ if name.startswith(_PREFIX)):
        if variable.removeprefix(_PREFIX).lower() not in _OPERATORS:
            what = f"{variable}: unknown operator; known: {', '.join(_OPERATORS)}"
            raise PlanError(what, remedy=f"unset {variable}", code="attention.bad_variable")
    for operator in facts.family.operators:
        for variable in (f"{_PREFIX}{operator.upper()}", "HALFTUNE_KERNELS"):
            value = os.environ.get(variable) or "auto"
            if value not in IMPLEMENTATIONS:
                what = f"{variable} is {value!r}; accepted: {', '.join(IMPLEMENTATIONS)}"
                raise PlanError(what, remedy=f"unset {variable}", code="attention.bad_variable")
            if value == "triton" and hardware.kind == "cpu" and not os.environ.get("TRITON_INTERPRET"):
                what = f"{variable}=triton is not supported on a CPU"
                raise PlanError(what, remedy=f"unset {variable}", code="attention.bad_variable")
            if value != "auto":
                asked.setdefault(operator, f"{variable}={value}")
    return asked


def _speed(hardware: Hardware, facts: ModelFacts, slow: str) -> str:
    if hardware.kind == "cpu":
        return "halftune's chunked operators with custom backward passes"
    if slow:
        return f"halftune's operators with torch's matmuls: {slow}"
    doubts = [row.reason for _, row in _gate_rows(hardware, facts) if row.verdict == "prove"]
    proof = f"; {doubts[0]}: verified before training, with torch as fallback" if doubts else ""
    return f"halftune's Triton kernels{proof}"


def _why_rejected(name: str, chosen: str, asked: str) -> str:
    if asked != "auto":
        return f"{asked} was asked for"
    return "one token or chunk at a time, several times slower" if name == "torch" else f"{chosen} is preferred"


def _own_objection(facts: ModelFacts) -> str:
    if not facts.family.operators:
        return f"no operators for the layers of {facts.model_type}"
    raw = facts.raw or {}
    text = raw.get("text_config") or raw
    for operator in facts.family.operators:
        for names in _HEAD_SIZES.get(operator, ()):
            name = next((name for name in names if text.get(name)), None)
            if name is not None and int(text[name]) > _LARGEST_HEAD:
                return f"{name} {text[name]} exceeds {_LARGEST_HEAD}"
    return ""


def runs_in_torch(hardware: Hardware, facts: ModelFacts) -> bool:
    """Whether the scan (the convolution if there is no scan) uses torch operations, as on a CPU or an old GPU."""
    scan = next(reversed(facts.family.operators), "")
    asked = asked_by_environment(hardware, facts).get(scan, "").partition("=")[2]
    return hardware.kind == "cpu" or (bool(_slow(hardware, facts)) if asked in ("", "triton") else True)


def _slow(hardware: Hardware, facts: ModelFacts) -> str:
    """The reason why our operators have no Triton kernels on this GPU; empty if they have, and on CPUs."""
    if hardware.kind == "cpu":
        return ""
    if hardware.kind != "cuda":
        return f"the kernels require an NVIDIA GPU (device: {hardware.kind})"
    operators = facts.family.operators
    for operator in operators:
        if not (Path(halftune_kernels.__file__).parent / "ops" / operator / "triton.py").exists():
            return f"{operator} has no Triton kernel yet"
    version = hardware.version("triton")
    if version is None:
        return "Triton is not installed"
    numbers = version_numbers(version)
    if numbers < OLDEST_TRITON:
        return f"Triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    refused = (f"{name}: {row.reason}" for name, row in _gate_rows(hardware, facts) if row.verdict == "refuse")
    return next(refused, "")


def _gate_rows(hardware: Hardware, facts: ModelFacts) -> list[tuple[str, Row]]:
    """Known problems of the model's operators on these GPUs with this Triton version: (device, row)."""
    numbers, found = version_numbers(hardware.version("triton") or ""), []
    for device in hardware.devices:
        major, minor = device.capability or (0, 0)
        for operator in facts.family.operators:
            found += [(device.name, row) for row in rows_for(operator, 10 * major + minor, numbers)]
    return found


def _fla_objection(hardware: Hardware, facts: ModelFacts) -> str:
    """The reason why flash-linear-attention cannot be used; empty if it can."""
    if not facts.family.fla:
        return f"no kernels for the layers of {facts.model_type}"
    if hardware.kind != "cuda":
        return f"requires CUDA (device: {hardware.kind})"
    weak = [device for device in hardware.devices if (device.capability or (0, 0)) < (8, 0)]
    if weak:
        return f"Triton emits no tensor-core instructions for {weak[0].name}"
    version = next(filter(None, map(hardware.version, LINEAR_PACKAGES)), None)
    if version is None:
        return "flash-linear-attention is not installed"
    if version_numbers(version) < _OLDEST_FLA:
        return f"flash-linear-attention {version} is older than {'.'.join(map(str, _OLDEST_FLA))}"
    triton = hardware.version("triton")
    if triton is None:
        return "triton is not installed"
    for device in hardware.devices:
        for known in LINEAR_MISCOMPILES:
            low, high = version_numbers(known.triton_low), version_numbers(known.triton_high)
            inside = low <= version_numbers(triton) < high
            if device.capability and device.capability[0] == known.capability_major and inside:
                return f"{known.what} on {device.name} with Triton {triton} (fixed in {known.triton_high})"
    return ""
