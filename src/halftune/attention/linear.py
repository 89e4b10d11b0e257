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
from halftune.core.choice import ASKED, Choice
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
_OPERATORS = (  # as in `dispatch`
    *("causal_conv1d", "gated_rms_norm", "ssd", "gated_delta_rule", "kda", "rwkv7"),
    *("rms_norm", "gated_activation", "adapted_activation", "rope", "linear_cross_entropy", "float8_rows"),
)
_NO_FLA, _NO_TRITON = "flash-linear-attention is not installed", "triton is not installed"
_OLDEST_FLA = (0, 2, 2)  # transformers silently ignores older versions


def route_linear(section: AttentionSection, hardware: Hardware, facts: ModelFacts) -> LinearRoute:
    """Choose the backend of the linear-attention layers, of which the model has some.

    Args:
        section: the requested backend (``attention.linear``).
        hardware: the machine.
        facts: the model.

    Raises:
        PlanError: the requested backend does not support this model's layers on this machine.
    """
    objections = _objections(hardware, facts)
    asked = section.linear
    if asked != "auto" and objections[asked]:
        raise _unavailable(asked, objections)
    chosen, why = (asked, ASKED) if asked != "auto" else _fastest(hardware, facts, objections)
    if chosen == "halftune" and (environment := asked_by_environment(hardware, facts)):
        why = f"halftune's operators, {', '.join(dict.fromkeys(environment.values()))}"
    left = [(name, why_not or _why_rejected(name, chosen, asked)) for name, why_not in objections.items()]
    return LinearRoute(Choice(chosen, why), tuple(entry for entry in left if entry[0] != chosen))


def _objections(hardware: Hardware, facts: ModelFacts) -> dict[str, str]:
    """Backend → why it cannot be used; empty if it can.

    Raises:
        PlanError: none can.
    """
    own = _own_objection(facts)
    if facts.model_type not in OWN:
        return {"halftune": own, "fla": _fla_objection(hardware, facts), "torch": ""}
    torch = f"transformers does not support {facts.model_type}"
    if own:
        what = f"no backend for the layers of {facts.model_type}: {own}; {torch}"
        raise PlanError(what, code="attention.backend_unavailable")
    return {"halftune": own, "fla": "halftune's own model code calls halftune's operators", "torch": torch}


def _unavailable(asked: str, objections: dict[str, str]) -> PlanError:
    remedy = "use attention: {linear: auto}" + ("" if objections["torch"] else " or {linear: torch}")
    if asked == "fla":
        missing = objections["fla"] in (_NO_FLA, _NO_TRITON)
        remedy += ", or install it" if missing else ", or another Triton version or device"
    what = f"{asked} is unavailable: {objections[asked]}"
    return PlanError(what, where="attention.linear", remedy=remedy, code="attention.backend_unavailable")


def _fastest(hardware: Hardware, facts: ModelFacts, objections: dict[str, str]) -> tuple[str, str]:
    """The backend that ``auto`` chooses, and why."""
    own, fla, slow = objections["halftune"], objections["fla"], _slow(hardware, facts)
    if not own and (fla or not slow):
        return "halftune", _speed(hardware, facts, slow)
    if not fla:
        return "fla", f"flash-linear-attention is installed; halftune: {own or slow}"
    return "torch", f"transformers' own code; halftune: {own}; fla: {fla}"


def asked_by_environment(hardware: Hardware, facts: ModelFacts) -> dict[str, str]:
    """Return ``VARIABLE=value`` for each operator whose implementation an environment variable sets.

    Raises:
        PlanError: a variable has an unknown value or operator, or requests Triton on a CPU.
    """
    asked = {}
    for variable in sorted(name for name in os.environ if name.startswith(_PREFIX)):
        if variable.removeprefix(_PREFIX).lower() not in _OPERATORS:
            raise _bad_variable(variable, f": unknown operator; known: {', '.join(_OPERATORS)}")
    triton = hardware.kind != "cpu" or bool(os.environ.get("TRITON_INTERPRET"))
    for operator in facts.family.operators:
        for variable in (f"{_PREFIX}{operator.upper()}", "HALFTUNE_KERNELS"):  # the former decides
            if (value := _implementation(variable, triton=triton)) != "auto":
                asked.setdefault(operator, f"{variable}={value}")
    return asked


def _implementation(variable: str, *, triton: bool) -> str:
    value = os.environ.get(variable) or "auto"
    if value not in IMPLEMENTATIONS:
        raise _bad_variable(variable, f" is {value!r}; accepted: {', '.join(IMPLEMENTATIONS)}")
    if value == "triton" and not triton:
        raise _bad_variable(variable, "=triton is not supported on a CPU")
    return value


def _bad_variable(variable: str, what: str) -> PlanError:
    return PlanError(f"{variable}{what}", remedy=f"unset {variable}", code="attention.bad_variable")


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
    text = facts.decoder_config
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
        return _NO_FLA
    if version_numbers(version) < _OLDEST_FLA:
        return f"flash-linear-attention {version} is older than {'.'.join(map(str, _OLDEST_FLA))}"
    triton = hardware.version("triton")
    return _NO_TRITON if triton is None else _miscompiled(hardware, triton)


def _miscompiled(hardware: Hardware, triton: str) -> str:
    """The known error of a Triton version on one of the devices; empty if there is none."""
    for device in hardware.devices:
        for known in LINEAR_MISCOMPILES:
            low, high = version_numbers(known.triton_low), version_numbers(known.triton_high)
            inside = low <= version_numbers(triton) < high
            if device.capability and device.capability[0] == known.capability_major and inside:
                return f"{known.what} on {device.name} with Triton {triton} (fixed in {known.triton_high})"
    return ""
