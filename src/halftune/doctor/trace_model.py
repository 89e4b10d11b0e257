"""Traces a recipe's model under its plan, in training and inference."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.jit import _state as jit_state
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.masking_utils import eager_mask
from transformers.utils import logging as transformers_logging

from halftune.attention.contract import (
    ENTRY_POINTS,
    FLEX_ENTRY_POINT,
    LINEAR_ENTRY_POINTS,
    ROTARY_ENTRY_POINT,
    Call,
    Operand,
    violations,
)
from halftune.config.run import RunConfig
from halftune.core.errors import HalftuneError
from halftune.doctor.inputs import inputs_for, untraced_towers
from halftune.model.attention.packing_check import small_copy
from halftune.model.files.architectures import multimodal_auto
from halftune.model.load.remote_code import last_line, remote_code_error
from halftune.model.meta.model import build, prepare, read_config
from halftune.plan import Plan
from halftune.precision.record.remote_files import written_in
from halftune.precision.report import check_dtypes
from halftune.precision.trace.fake_tensors import NEEDS_VALUES, FakeTensors
from halftune.precision.trace.findings import Finding, findings
from halftune.precision.trace.flash_stubs import flash_attn_importable
from halftune.precision.trace.layer_reuse import reuse_equal_layers
from halftune.precision.trace.skip_kernels import skip_triton_kernels
from halftune.precision.trace.tracer import Arrival, Tracer

NAME = "halftune_trace"
TRAIN, CHAT = "train", "chat"


@dataclass(frozen=True)
class TraceReport:
    """The result of tracing a model.

    Attributes:
        model, machine: descriptions of the traced model and the machine.
        rules: the autocast rules: ``CUDA`` or ``CPU``.
        tensors: ``without weights``, ``a small copy with numbers`` or ``real``.
        calls: number of traced calls of (linear) attention, by phase.
        findings: operands outside the planned dtype; those at the loss are harmless.
        notes: remarks for the user.
        seconds: wall time.
    """

    model: str
    machine: str
    compute: str
    autocast: bool
    attention: str
    guard: str
    rules: str
    tensors: str
    calls: dict[str, int]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def violations(self) -> list[Finding]:
        """Findings that violate attention's dtype contract."""
        return [finding for finding in self.findings if finding.breaks]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        plain = {name: value for name, value in vars(self).items() if name != "findings"}
        found = [finding.to_dict() for finding in self.findings]
        return {**plain, "contract_holds": not self.violations, "findings": found}


def trace_model(config: RunConfig, plan: Plan, *, real: bool = False) -> TraceReport:
    """Run a training step and a generation step, without weights and without a GPU.

    Args:
        config: the recipe.
        plan: as it would run; ``plan.device`` tells whose casting rules count.
        real: with numbers, on a small copy of the model, instead of without.

    Raises:
        HalftuneError: the model's code is broken, or cannot be built; names the line.
    """
    begun = time.monotonic()
    tracer = Tracer(
        plan.precision,
        cuda_rules=plan.device.value != "cpu",
        functions=(*ENTRY_POINTS, FLEX_ENTRY_POINT),
        rotary=(ROTARY_ENTRY_POINT,),
        linear=LINEAR_ENTRY_POINTS,
    )
    notes: list[str] = []
    tensors = "a small copy with numbers" if real else "without weights"
    foreign = config.model.trust_remote_code  # its layers may call kernels; those of transformers have torch code
    around = skip_triton_kernels() if foreign else nullcontext()
    with _silent(), _as_python(), _registered(tracer), around, flash_attn_importable(), tracer.importing():
        model_config = read_config(config.model)
        if _may_read_masks(model_config):
            AttentionMaskInterface.register(NAME, eager_mask)
        if real:
            _small(model_config, config, plan, tracer)
        else:
            try:
                _whole(model_config, config, plan, tracer)
            except NEEDS_VALUES as needed:
                at = last_line(needed)
                notes.append(f"The model's code looks at values{f' ({at})' if at else ''}: traced on a small copy.")
                tracer.arrivals.clear()
                tensors = "a small copy with numbers"
                _small(model_config, config, plan, tracer)
    found = findings(
        tracer.arrivals, mode=plan.attention.guard, scale=_scale(plan, tracer), objection=objection, training=TRAIN
    )
    found = [replace(one, file=written_in(one.file, config.model.name_or_path)) for one in found]
    notes += _notes(model_config, plan, tracer)
    return TraceReport(
        model=plan.model,
        machine=plan.machine,
        compute=plan.precision.compute.value,
        autocast=plan.precision.autocast.value,
        attention=plan.attention.softmax.value,
        guard=plan.attention.guard,
        rules="CUDA" if tracer.cuda_rules else "CPU",
        tensors=tensors,
        calls=_calls(tracer),
        findings=tuple(found),
        notes=tuple(notes),
        seconds=round(time.monotonic() - begun, 2),
    )


def objection(arrival: Arrival) -> str:
    """flash-attn's error for these operands without the guard; empty if it accepts them."""
    if arrival.target != "attention" or len(arrival.operands) < 3:
        return ""
    torchs = arrival.function in ("scaled_dot_product_attention", FLEX_ENTRY_POINT.name)
    if torchs or not arrival.guarded:  # torch's own words, where they differ
        alike = len({operand.dtype for operand in arrival.operands}) == 1
        text = f"{'Expected query, key, and value' if torchs else 'expected m1 and m2'} to have the same dtype"
        return "" if torchs and alike else text
    shape = (1, 8, 1, 8)
    q, k, v = (Operand(str(each.dtype).removeprefix("torch."), shape) for each in arrival.operands[:3])
    return next(violations(Call(q, k, v)), "")


def _whole(model_config: PretrainedConfig, config: RunConfig, plan: Plan, tracer: Tracer) -> None:
    inputs = inputs_for(model_config, images=_sees(plan))
    with FakeTensors() as mode:
        built = build(model_config, config.model, plan, _attention(plan))
        model = prepare(built, config, plan, mode)
        _check(model, plan)
        fakes = {name: _fake(mode, value) for name, value in inputs.items()}
        with reuse_equal_layers(model, tracer) as layers:
            try:
                _phases(model, fakes, config, tracer)
            except (*NEEDS_VALUES, HalftuneError):
                if not layers.replays:
                    raise
                layers.doubtful = True
        if layers.doubtful:  # layers that look alike depend on each other: run all
            tracer.arrivals.clear()
            _phases(model.train(), fakes, config, tracer)


def _small(model_config: PretrainedConfig, config: RunConfig, plan: Plan, tracer: Tracer) -> None:
    with torch.random.fork_rng(devices=[]):
        try:
            small = small_copy(model_config).config
        except HalftuneError:
            raise
        except Exception as error:  # the model's own code may raise anything
            raise remote_code_error(error, config.model, None) from error
        model = prepare(build(small, config.model, plan, _attention(plan)), config, plan, None)
        _check(model, plan)
        _phases(model, inputs_for(small, images=_sees(plan)), config, tracer)


def _phases(model: nn.Module, inputs: dict[str, Any], config: RunConfig, tracer: Tracer) -> None:
    """Run a training step, then a prompt and the token after it.

    Raises:
        ModelError: the model's code fails; names the line.
    """
    call: Any = model
    doing = "the model was built, and its forward pass fails in training"
    try:
        with tracer.phase(TRAIN, model, grad=True):
            logits = call(**inputs, use_cache=False).logits
            tracer.loss(logits)
            doing = "the model was built, and its backward pass fails"
            nn.functional.cross_entropy(logits.float().flatten(0, 1), inputs["input_ids"].flatten()).backward()
        doing = "the model was built, and its forward pass fails in a conversation (it trains)"
        with tracer.phase(CHAT, model.eval(), grad=False):
            answered = call(**inputs, use_cache=True)
            cache = vars(answered).get("past_key_values") or dict(answered).get("past_key_values")
            if cache is not None:
                doing = "the model was built, and its forward pass fails with a cache (it trains)"
                call(input_ids=inputs["input_ids"][:, -1:], past_key_values=cache, use_cache=True)
    except (*NEEDS_VALUES, HalftuneError):
        raise
    except Exception as error:  # the model's own code may raise anything
        raise remote_code_error(error, config.model, None, doing, tracer.refusal(config.model.name_or_path)) from error


def _check(model: nn.Module, plan: Plan) -> None:
    """The error of the dtype report's check for the built model."""
    check_dtypes(model, plan.precision)


def _attention(plan: Plan) -> str:
    return "eager" if plan.attention.provider.value == "model" else NAME


def _fake(mode: FakeTensors, value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return mode.from_tensor(value) if floating else value


def _scale(plan: Plan, tracer: Tracer) -> float:
    """Tokens per device and step, per traced token."""
    logits = next((each.operands[0] for each in tracer.arrivals if each.target == "loss"), None)
    if logits is None:
        return 1.0
    return plan.batch.tokens_per_step / max(plan.batch.world_size, 1) / (logits.shape[0] * logits.shape[1])


def _may_read_masks(config: PretrainedConfig) -> bool:
    """Whether the model's class has no flash attention, so that its code may read the mask."""
    classes = (auto._model_mapping.get(type(config), None) for auto in (AutoModelForCausalLM, multimodal_auto(config)))
    return any(not getattr(one, "_supports_flash_attn", True) for one in classes if one is not None)


def _sees(plan: Plan) -> bool:
    """Whether the run trains on images."""
    return plan.towers is not None and plan.towers.value == "used"


def _calls(tracer: Tracer) -> dict[str, int]:
    counted: dict[str, int] = {}
    for arrival in tracer.arrivals:
        if arrival.target in ("attention", "linear attention"):
            label = f"{arrival.target}, {arrival.phase}"
            counted[label] = counted.get(label, 0) + 1
    return counted


def _notes(config: PretrainedConfig, plan: Plan, tracer: Tracer) -> Iterator[str]:
    targets = {arrival.target for arrival in tracer.arrivals}
    if "attention" not in targets and "linear attention" not in targets:
        if plan.attention.provider.value == "model":
            yield f"{plan.attention.provider.reason[0].upper()}{plan.attention.provider.reason[1:]}: no call was seen."
        else:
            yield f"No attention call was traced: {config.model_type} has its own attention code, or none."
    if why := untraced_towers(config, images=_sees(plan)):
        yield f"Only the language model was traced: {why}."
    if plan.precision.compute.value == "fp32":
        yield "The plan computes in fp32: there is nothing to promote."


@contextmanager
def _registered(tracer: Tracer) -> Iterator[None]:
    """Inside, the trace's attention is registered with transformers, with a mask function that builds no mask."""
    AttentionInterface.register(NAME, tracer.attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(NAME, None)


@contextmanager
def _as_python() -> Iterator[None]:
    """Inside, compiled and scripted functions of the model's code run eagerly, so that their lines are traced."""
    scripted = bool(jit_state._enabled)
    jit_state.disable()  # counts for code that is imported inside
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if scripted:
            jit_state.enable()


@contextmanager
def _silent() -> Iterator[None]:
    shown = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    with ExitStack() as stack:
        stack.callback(transformers_logging.set_verbosity, shown)
        yield
