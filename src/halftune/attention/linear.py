"""The only place that chooses who computes linear-attention, state-space and convolution layers, with its reasons."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import halftune_kernels
from halftune.attention.backends import LINEAR_FAMILIES, LINEAR_MISCOMPILES, LINEAR_PACKAGES
from halftune.config.facts.model import ModelFacts
from halftune.config.facts.model_types import OWN
from halftune.config.sections.attention import AttentionSection
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.hardware.facts import Hardware
from halftune_kernels.gate import OLDEST_TRITON, Row, rows_for

_DELTA, _KDA, _SSD = ("causal_conv1d", "gated_delta_rule"), ("causal_conv1d", "kda"), ("causal_conv1d", "ssd")
# Families of transformers whose layers call functions that can be replaced, and our operators behind them. All of them
# are told where the samples of a packed row end. The others (Mamba-1, MiniMax, RWKV-4, xLSTM …) keep their own loops.
ROUTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid"), _DELTA),
    **dict.fromkeys(("kimi_linear", "glm5_next", "bailing_hybrid"), _KDA),
    **dict.fromkeys(("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "zamba2", "nemotron_h"), _SSD),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), ("causal_conv1d",)),
    "rwkv7": ("rwkv7",),
}
# Head sizes that our operators limit, by what config.json calls them; of each tuple the first that a model has counts.
_HEAD_SIZES: dict[str, tuple[tuple[str, ...], ...]] = {
    "gated_delta_rule": (("linear_key_head_dim",), ("linear_value_head_dim",)),
    "kda": (("linear_head_dim", "head_dim"),),
    "ssd": (("mamba_d_state", "ssm_state_size", "state_size"),),
    "rwkv7": (("head_dim",),),
}
_LARGEST_HEAD = 256
# What HALFTUNE_KERNELS may say: halftune_kernels.dispatch.NAMES, which costs an import of torch, and auto.
IMPLEMENTATIONS = ("triton", "torch", "cpu", "reference", "auto")
_OF_ONE = "HALFTUNE_KERNELS_"  # and an operator's name in capitals
_OPERATORS = ("causal_conv1d", "gated_rms_norm", "ssd", "gated_delta_rule", "kda", "rwkv7")  # of `dispatch`, likewise
_OLDEST_FLA = (0, 2, 2)  # transformers takes no older one, and says nothing


class LinearRoute(NamedTuple):
    """Who computes the linear-attention layers.

    Attributes:
        chosen: ``halftune | fla | torch``, ``none`` where the model has no such layer.
        rejected: (backend, reason) of every one that was not taken.
    """

    chosen: Choice[str]
    rejected: tuple[tuple[str, str], ...]


def operators_of(model_type: str) -> tuple[str, ...]:
    """Our operators for the layers of a family; empty where there is no way into them."""
    return ROUTED.get(model_type.removesuffix("_text"), ())


def route_linear(section: AttentionSection, hardware: Hardware, facts: ModelFacts) -> LinearRoute:
    """Chooses who computes the linear-attention layers.

    Args:
        section: what was asked for (``attention.linear``).
        hardware: where it runs.
        facts: the model.

    Raises:
        PlanError: what was asked for cannot compute this model's layers on this machine.
    """
    if not facts.linear_layers:
        return LinearRoute(Choice("none", "every layer has softmax attention"), ())
    own, fla, slow = _own_objection(facts), _fla_objection(hardware, facts), _slow(hardware, facts)
    if facts.model_type in OWN:
        fla = "the model is halftune's own code here, which calls halftune's operators"
    torch = f"transformers has no code for {facts.model_type}" if facts.model_type in OWN else ""
    objections = {"halftune": own, "fla": fla, "torch": torch}
    if own and torch:
        raise PlanError(f"nothing here computes the layers of {facts.model_type}: {own}; {torch}")
    asked = section.linear
    if asked != "auto" and objections[asked]:
        ways = "attention: {linear: auto}" + ("" if torch else " or {linear: torch}")
        way = ", or install it" if "not installed" in fla and asked == "fla" else ", or another Triton or device"
        what = f"{asked} is not possible: {objections[asked]}"
        raise PlanError(what, where="attention.linear", remedy=ways + (way if asked == "fla" else ""))
    if asked != "auto":
        chosen, why = asked, "asked for"
    elif not own and (fla or not slow):
        chosen, why = "halftune", _speed(hardware, facts, slow)
    elif not fla:
        chosen, why = "fla", f"flash-linear-attention is installed; halftune: {own or slow}"
    else:
        chosen, why = "torch", f"transformers' own code; halftune: {own}; fla: {fla}"
    if chosen == "halftune" and (environment := asked_by_environment(hardware, facts)):
        why = f"own operators, {', '.join(dict.fromkeys(environment.values()))}"
    left = [(name, why_not or _not_taken(name, chosen, asked)) for name, why_not in objections.items()]
    return LinearRoute(Choice(chosen, why), tuple(entry for entry in left if entry[0] != chosen))


def asked_by_environment(hardware: Hardware, facts: ModelFacts) -> dict[str, str]:
    """What the environment asks our operators to be computed by: ``VARIABLE=value`` of each that it says something of.

    Raises:
        PlanError: it asks for what does not exist, names no operator, or wants Triton on a CPU.
    """
    asked = {}
    for variable in sorted(name for name in os.environ if name.startswith(_OF_ONE)):
        if variable.removeprefix(_OF_ONE).lower() not in _OPERATORS:
            what = f"{variable} names no operator: they are {', '.join(_OPERATORS)}"
            raise PlanError(what, remedy=f"unset {variable}")
    for operator in operators_of(facts.model_type):
        for variable in (f"{_OF_ONE}{operator.upper()}", "HALFTUNE_KERNELS"):
            value = os.environ.get(variable) or "auto"
            if value not in IMPLEMENTATIONS:
                what = f"{variable} is {value!r}, not one of {', '.join(IMPLEMENTATIONS)}"
                raise PlanError(what, remedy=f"unset {variable}")
            if value == "triton" and hardware.kind == "cpu" and not os.environ.get("TRITON_INTERPRET"):
                raise PlanError(f"{variable}=triton, and the device is the CPU", remedy=f"unset {variable}")
            if value != "auto":
                asked.setdefault(operator, f"{variable}={value}")
    return asked


def _speed(hardware: Hardware, facts: ModelFacts, slow: str) -> str:
    if hardware.kind == "cpu":
        return "own operators, in chunks, with backward passes of their own"
    if slow:
        return f"own operators in torch's matmuls: {slow}"
    doubts = [row.reason for _, row in _gate_rows(hardware, facts) if row.verdict == "prove"]
    proof = f"; {doubts[0]}: they prove themselves there before training, or torch runs" if doubts else ""
    return f"own operators, Triton kernels{proof}"


def _not_taken(name: str, chosen: str, asked: str) -> str:
    if asked != "auto":
        return f"{asked} was asked for"
    return "one token or one chunk at a time, several times slower" if name == "torch" else f"{chosen} comes first"


def _own_objection(facts: ModelFacts) -> str:
    if not operators_of(facts.model_type):
        return f"no way into the layers of {facts.model_type}"
    raw = facts.raw or {}
    text = raw.get("text_config") or raw
    for operator in operators_of(facts.model_type):
        for names in _HEAD_SIZES.get(operator, ()):
            name = next((name for name in names if text.get(name)), None)
            if name is not None and int(text[name]) > _LARGEST_HEAD:
                return f"{name} {text[name]} is over {_LARGEST_HEAD}"
    return ""


def runs_in_torch(hardware: Hardware, facts: ModelFacts) -> bool:
    """Whether the scan (the convolution, where there is none) runs in torch's operations: on a CPU or an old GPU."""
    scan = next(reversed(operators_of(facts.model_type)), "")
    asked = asked_by_environment(hardware, facts).get(scan, "").partition("=")[2]
    return hardware.kind == "cpu" or (bool(_slow(hardware, facts)) if asked in ("", "triton") else True)


def _slow(hardware: Hardware, facts: ModelFacts) -> str:
    """Why our operators would run without Triton kernels on a GPU; empty where they need none or have them."""
    if hardware.kind == "cpu":
        return ""
    if hardware.kind != "cuda":
        return f"the kernels are written for NVIDIA GPUs, the device is {hardware.kind}"
    operators = operators_of(facts.model_type)
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
    """What is known of the GPUs with this Triton, for the operators of the model: (device, finding)."""
    numbers, found = version_numbers(hardware.version("triton") or ""), []
    for device in hardware.devices:
        major, minor = device.capability or (0, 0)
        for operator in operators_of(facts.model_type):
            found += [(device.name, row) for row in rows_for(operator, 10 * major + minor, numbers)]
    return found


def _fla_objection(hardware: Hardware, facts: ModelFacts) -> str:
    """Why flash-linear-attention cannot be used; empty where it can."""
    if not facts.model_type.startswith(LINEAR_FAMILIES):
        return f"has no kernels for the layers of {facts.model_type}"
    if hardware.kind != "cuda":
        return f"needs CUDA, the device is {hardware.kind}"
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


def version_numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``3.7.1+git5`` → (3, 7, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group(0).split(".")) if match else ()
