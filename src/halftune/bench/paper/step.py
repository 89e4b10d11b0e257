"""A training step of a recipe on fake CUDA tensors, by the code that trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import initialization

from halftune.bench.paper.fake_cuda import CUDA, fake_cuda, move
from halftune.bench.paper.fuse import fused_on_paper
from halftune.bench.paper.micro_batches import repeated_micro_batches
from halftune.bench.paper.recorder import Launch, Recorder, Sync
from halftune.config.run import RunConfig
from halftune.config.sections.model import LoraAdapter
from halftune.core.errors import PlanError
from halftune.data.batch import LABEL_POSITIONS, WEIGHT, Batch, collate
from halftune.data.encode.groups import LABEL
from halftune.data.store import NO_LABEL, Example, Segment
from halftune.hardware import Device
from halftune.methods import make_method
from halftune.model.attention.register import registered_attention
from halftune.model.embedding_noise import add_noise
from halftune.model.load.load import recompute_activations
from halftune.model.meta.model import build, prepare, read_config
from halftune.model.meta.packed_weights import FORMATS, pack_linear_layers
from halftune.optim import make_optimizer
from halftune.plan import Plan
from halftune.train.checkpoint.run_inputs import UNCHANGED
from halftune.train.loop.step import StartedStep, finish_step, start_step
from halftune.train.loop.stepper import runs_late
from halftune.train.parallel.strategy import Strategy
from halftune.train.reference import Precomputed
from halftune.train.schedule import make_schedule
from halftune.train.state import TrainState

_STEPS = 100  # of the schedule
_METHODS = ("sft", "pretrain", "dpo", "simpo", "orpo", "cpo", "kto")


@dataclass(frozen=True)
class Recorded:
    """A recorded step: its launches and waits, tokens, samples per row, what was fused, memory, and micro-batches.

    ``trained``: tokens with a label that is predicted. ``peak``: bytes of all tensors at their most, without workspaces
    of libraries and reserves of the allocator.
    """

    launches: list[Launch]
    syncs: list[Sync]
    calls: int
    tokens: int
    trained: int
    sample: int
    layers: int
    fused: str
    peak: int
    micro_batches: int


def record_step(config: RunConfig, plan: Plan, device: Device, *, sample: int | None = None) -> Recorded:
    """Record the second step of a run: the first creates the optimizer's state and checks the model's head.

    Args:
        config, plan: as trained.
        device: the planned GPU.
        sample: tokens of every sample; by default ``data.max_length``, one sample in a row.

    Raises:
        PlanError: a step of this kind cannot be run without data, or on this device.
        HalftuneError: the model cannot be built.
    """
    check_supported(config, plan, device)
    recorder = Recorder(ranks(config))
    length = min(sample or config.data.max_length, config.data.max_length)
    with (
        torch.random.fork_rng(devices=[]),
        fake_cuda(recorder, device) as mode,
        registered_attention(plan) as attention,
    ):
        model = _model(config, plan, attention, mode)
        run = state(config, plan, model, CUDA)
        batches = [micro_batch(run, length)] * plan.batch.accumulation
        with fused_on_paper(model, plan) as fused, recorder.watching(model):
            if config.training.neftune_alpha is not None:
                add_noise(model, config.training.neftune_alpha)
            before = _start(run, recorder, batches)
            if not run.late:
                finish_step(run, before)
            with recorder.recording():
                now = _start(run, recorder, batches)
                finish_step(run, before if run.late else now)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
    tokens, trained = sum(batch.fed for batch in batches), sum(batch.trained for batch in batches)
    made = recorder.launches, recorder.syncs, recorder.calls
    return Recorded(*made, tokens, trained, length, layers, fused, recorder.peak, plan.batch.accumulation)


def check_supported(config: RunConfig, plan: Plan, device: Device) -> None:
    """Refuse what has no step without data or a GPU that is not described.

    Raises:
        PlanError: says what.
    """
    packed = plan.weights.format.value
    refused = (
        (f"{device.kind} devices", device.kind != "cuda", "name an NVIDIA GPU"),
        (f"method: {config.method.type}", config.method.type not in _METHODS, ""),
        (f"frozen weights in {packed}", not _known_format(plan), ""),
        ("images and audio", bool(config.data.media), ""),
        (f"adapter.use_dora over weights in {packed}", _packed_dora(config, plan), "set adapter.use_dora: false"),
        ("flex attention over padded rows", _padded_flex(plan), "set data.packing: true"),
        ("several processes", plan.batch.world_size > 1, ""),
        ("training.torch_compile", config.training.torch_compile, "set training.torch_compile: false"),
    )
    for what, found, remedy in refused:
        if found:
            remedy = remedy or "measure it with halftune bench on the machine itself"
            raise PlanError(f"bench --paper does not support {what}", remedy=remedy, code="bench.paper_unsupported")


def _padded_flex(plan: Plan) -> bool:
    return plan.attention.softmax.value == "flex" and not plan.batch.packing.value


def _known_format(plan: Plan) -> bool:
    """Whether frozen weights are plain, or packed on load into 4 bits; experts that are packed have no step here."""
    if plan.weights.experts:
        return False
    return plan.weights.format.value in (None, "none") or plan.weights.format.value in FORMATS


def _packed_dora(config: RunConfig, plan: Plan) -> bool:
    """Whether peft reads packed weights, which have no values."""
    return plan.weights.format.value in FORMATS and isinstance(config.adapter, LoraAdapter) and config.adapter.use_dora


def _start(run: TrainState, recorder: Recorder, batches: list[Batch]) -> StartedStep:
    with repeated_micro_batches(run, recorder):
        return start_step(run, [batch.to(CUDA) for batch in batches])


def ranks(config: RunConfig) -> frozenset[int]:
    """Sizes of an adapter's inner dimension: alone, stacked for layers of one input, padded for experts."""
    adapter = config.adapter
    if not isinstance(adapter, LoraAdapter):
        return frozenset()
    padded = [adapter.rank + -adapter.rank % 8] if adapter.target_parameters else []
    return frozenset([*(adapter.rank * many for many in (1, 2, 3, 4)), *padded])


def built_on_paper(config: RunConfig, plan: Plan, attention: str) -> Any:
    """The model with its linear layers as the plan keeps them, on fake tensors."""
    with initialization.no_init_weights():  # some draw again until all values are in range, and there are no values
        built = build(read_config(config.model), config.model, plan, attention)
    built.tie_weights()  # a part of what initialises them
    if plan.weights.format.value in FORMATS:
        pack_linear_layers(built, plan, CUDA)
    return built


def _model(config: RunConfig, plan: Plan, attention: str, mode: Any) -> Any:
    built = built_on_paper(config, plan, attention)
    if plan.attention.linear.value != "none":
        from halftune.model.attention.linear import route_linear_layers  # imports the operators

        route_linear_layers(built, plan)
    if plan.batch.gradient_checkpointing.value:
        recompute_activations(built)
    model = prepare(built, config, plan, mode)
    move(model)
    return model


def state(config: RunConfig, plan: Plan, model: Any, device: torch.device) -> TrainState:
    """The state of a run of one process without data, for ``start_step``."""
    accelerator: Any = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True, device=device)
    optimizer = make_optimizer(model, config.training, plan.precision, config.adapter)
    absent: Any = None
    run = TrainState(
        config=config,
        plan=plan,
        folder=Path(config.training.output_dir),
        resume_from=None,
        changes=UNCHANGED,
        inputs={},
        accelerator=accelerator,
        strategy=Strategy(accelerator, plan),
        device=device,
        is_main=True,
        model=model,
        wrapped=model,
        tokenizer=absent,
        method=make_method(config.method),
        optimizer=optimizer,
        schedule=make_schedule(config.training, optimizer, _STEPS),
        scaler=torch.amp.GradScaler("cuda", enabled=plan.precision.grad_scaler.value),
        data=absent,
        feed=absent,
        eval_feed=None,
        position={},
        micro_batch=plan.batch.micro_batch,
        total_steps=_STEPS,
        steps_per_epoch=_STEPS,
    )
    run.late = runs_late(run)
    if plan.method.reference.value == "precomputed":
        run.reference = Precomputed(torch.zeros(0, config.method.segments))
    return run


def micro_batch(run: TrainState, length: int) -> Batch:
    """A micro-batch of full rows, every token labelled."""
    many = run.config.method.segments
    rows, packed = run.plan.batch.micro_batch * many, run.plan.batch.packing.value
    total = rows * run.config.data.max_length
    lengths = [length] * (total // length if packed else rows)
    if packed and total % length:
        lengths.append(total % length)
    segments = [Segment(np.arange(n, dtype=np.int32) % 100, np.ones(n, dtype=bool)) for n in lengths]
    examples = [Example(tuple(segments[at : at + many])) for at in range(0, len(segments) // many * many, many)]
    with unset_fake_temporarily():  # as the data's
        made = collate(examples, 0, packed=packed)
        predicted = made.tokens["labels"][:, 1:] != NO_LABEL
        positions = predicted.any(dim=0).nonzero().squeeze(1)
    labelled = int(predicted.sum())
    weights = torch.tensor([run.method.weight(example) for example in examples])
    fed = made.tokens["input_ids"].numel()
    extras = {**made.extras, LABEL_POSITIONS: positions}
    columns = {WEIGHT: weights}
    if run.config.method.type == "kto":  # good and bad answers cost the same
        columns |= {LABEL.format(index): torch.ones(len(examples)) for index in range(many)}
    counts = {"weight": float(weights.sum()), "fed": fed, "real": sum(lengths), "trained": labelled}
    return replace(made, extras=extras, columns=columns, **counts)
