"""From a config and its plan to objects that can train: tokenizer, data, model, adapter, optimizer, feed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from halftune.config.load import LoadedConfig
from halftune.config.run import RunConfig
from halftune.config.sections.model import LoraAdapter, ModelSection
from halftune.core.choice import Choice
from halftune.core.errors import ConfigError
from halftune.core.log import get_logger
from halftune.core.processes import heartbeat
from halftune.data.pipeline import PreparedData, TokenizedSplit, prepare
from halftune.methods import make_method
from halftune.model.adapters import attach_adapter
from halftune.model.adapters.peft_experts import not_loaded_by_peft
from halftune.model.attention.packing_check import packing_verdict
from halftune.model.files.architectures import is_multimodal, read_config
from halftune.model.files.locate import locate, media_of
from halftune.model.float8_layers import use_float8
from halftune.model.fused import fuse
from halftune.model.load.load import load_model
from halftune.model.load.towers import small_multimodal_copy
from halftune.model.policy.policy import check_router_loss
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.model.tokenizer.vocabulary import check_ids, padding_id
from halftune.optim import make_optimizer
from halftune.plan import Plan
from halftune.plan.distribution import needs_whole_weights
from halftune.plan.finalise import Evidence, finalise
from halftune.precision.report import check_dtypes
from halftune.train.batches.feed import Feed
from halftune.train.callback import Phase
from halftune.train.checkpoint.checkpoint import first_weights
from halftune.train.checkpoint.resume import check_same_data, choose_checkpoint, position, resumed_batch
from halftune.train.checkpoint.run_inputs import UNCHANGED, check_same_inputs, contents, run_inputs, template_date
from halftune.train.compile_ahead import compile_ahead
from halftune.train.loop.stepper import runs_late
from halftune.train.numeric_environment import seed_everything, set_rounding
from halftune.train.parallel import make_strategy
from halftune.train.parallel.processes import check_agreed, keep_freed_memory, make_accelerator
from halftune.train.parallel.strategy import Strategy
from halftune.train.run_folder.start_or_resume import RunFolder
from halftune.train.schedule import check_steps, make_schedule
from halftune.train.state import TrainState

if TYPE_CHECKING:
    from halftune.data.media.processor import MediaProcessor
    from halftune.model.load.lazy_weights import LazyWeights
    from halftune.train.teacher import Teacher

log = get_logger(__name__)


def build(
    loaded: LoadedConfig, plan: Plan, folder: RunFolder, phase: Callable[[Phase], None] = lambda _: None
) -> TrainState:
    """Builds a run's state: data first, before any process group exists, then the model with the plan's dtypes.

    Args:
        loaded, plan: what was asked and what was decided.
        folder: the run folder, and what is known of the checkpoint that is resumed from.
        phase: called with the name of the next phase.

    Raises:
        HalftuneError: data, model, adapter or checkpoint are wrong; nothing in the run folder has changed.
    """
    config = loaded.run
    phase("tokenising")
    tokenizer = check_models(config)
    data = prepare(config, tokenizer, template_date(folder.path, folder.resume_from), media_of(config))
    phase("loading")
    accelerator = make_accelerator(plan)
    inputs = run_inputs(config, tokenizer, data)
    check_agreed(accelerator, "base model, tokenizer or data file", contents(inputs))
    resume_from, changes = choose_checkpoint(folder, accelerator.num_processes), UNCHANGED
    if resume_from is not None:
        changes = check_same_inputs(inputs, config.training.allow_changes, resume_from)
    plan = finalise(plan, evidence(config, plan, resume_from))
    set_rounding(plan.precision.tf32.value, config.training.deterministic)
    compile_ahead(config, plan, accelerator.device, phase)
    teacher = place_teacher(config, plan, accelerator.device, tokenizer, data)
    strategy, model, wrapped = place_model(config, plan, accelerator, tokenizer, data, resume_from)
    feed = feed_of(config, plan, accelerator, data, model, tokenizer)
    check_agreed(accelerator, "training data", feed.fingerprint())
    total, optimizer = check_steps(config.training, feed.total_steps()), optimizer_of(config, plan, model)
    run = TrainState(
        config=config,
        plan=plan,
        folder=folder.path,
        resume_from=resume_from,
        changes=changes,
        inputs=inputs,
        accelerator=accelerator,
        strategy=strategy,
        device=accelerator.device,
        is_main=accelerator.is_main_process,
        model=model,
        wrapped=wrapped,
        tokenizer=tokenizer,
        method=feed.method,
        optimizer=optimizer,
        schedule=make_schedule(config.training, optimizer, total),
        scaler=torch.amp.GradScaler(accelerator.device.type, enabled=plan.precision.grad_scaler.value),
        data=data,
        feed=feed,
        eval_feed=feed.for_evaluation(data.eval, config.training.per_device_eval_batch_size) if data.eval else None,
        position=position(feed),
        micro_batch=feed.batch.micro_batch,
        total_steps=total,
        steps_per_epoch=feed.steps_in(0),
    )
    check_same_data(run)
    return with_reference(run, teacher)


def optimizer_of(config: RunConfig, plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all trained weights, with the learning rates of their parts."""
    optimizer = make_optimizer(model, config.training, plan.precision, config.adapter)
    if plan.parts:
        from halftune.model.load.parts import set_part_rates  # few runs have several parts

        set_part_rates(optimizer, model, config.training)
    return optimizer


def place_teacher(
    config: RunConfig, plan: Plan, device: torch.device, tokenizer: PreTrainedTokenizerBase, data: PreparedData
) -> Teacher | None:
    """The model that is learned from. It comes before the model in training, whose attention guard is the run's.

    Raises:
        ModelError: it cannot be loaded, or a token has no embedding.
    """
    if config.method.teacher_model is None or plan.teacher is None:
        return None
    from halftune.train.teacher import load_teacher

    teacher = load_teacher(config.method.teacher_model, plan.teacher, device)
    check_tokens(teacher.policy.model, tokenizer, data)
    return teacher


def with_reference(run: TrainState, teacher: Teacher | None) -> TrainState:
    """The run, with its teacher, or the log-probabilities of the model before training where the plan says so."""
    run.reference = run.eval_reference = teacher
    run.late = runs_late(run)
    if run.config.method.samples_answers:
        from halftune.train.rollouts import make_rollouts  # few runs answer prompts

        run.rollouts = make_rollouts(run)
    if run.plan.method.reference.value != "precomputed":
        return run
    from halftune.train.reference import precompute  # few runs need it

    run.reference = precompute(run, run.feed)
    run.eval_reference = precompute(run, run.eval_feed) if run.eval_feed else None
    return run


def check_models(config: RunConfig) -> PreTrainedTokenizerBase:
    """Finds the weights that training starts from, before the data is prepared; of the hub: downloads them.

    Returns:
        the tokenizer of the model in training.

    Raises:
        ModelError: the base model, its tokenizer, the adapter or the teacher is not there, or they do not belong
            together.
    """
    locate(config.model)
    if isinstance(config.adapter, LoraAdapter) and config.adapter.name_or_path is not None:
        from halftune.model.adapters.start import check_start  # few runs start from an adapter

        check_start(config)
    tokenizer, teacher = load_tokenizer(config.model), config.method.teacher_model
    if teacher is not None:
        from halftune.train.teacher import check_vocabulary  # few runs have a teacher

        locate(teacher)
        check_vocabulary(tokenizer, teacher)
    return tokenizer


def place_model(
    config: RunConfig,
    plan: Plan,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    resume_from: Path | None = None,
) -> tuple[Strategy, nn.Module, nn.Module]:
    """The strategy, the model with the plan's dtypes where it is computed, and what forward passes are made with.

    Raises:
        HalftuneError: as ``make_model`` and the strategy; or a token has no embedding.
    """
    model, lazy = make_model(config, plan, first_weights(resume_from, config.adapter))
    check_tokens(model, tokenizer, data)
    check_dtypes(model, plan.precision)
    if left := not_loaded_by_peft(model):
        what = "peft alone would not load %d tensors of this adapter (%s …), which it renames: use `halftune export`"
        log.warning(what, len(left), left[0])
    use_float8(model, plan, emulate=accelerator.device.type != "cuda", device=accelerator.device)
    seed_everything(config.training.seed + accelerator.process_index)  # every process its own dropout
    strategy = make_strategy(accelerator, plan)
    strategy.place(model, lazy)
    fuse_layers(model, plan)
    if config.training.neftune_alpha is not None:
        from halftune.model.embedding_noise import add_noise

        add_noise(model, config.training.neftune_alpha)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    if config.training.torch_compile:
        from halftune.model.compiled import compile_layers
        from halftune.train.parallel.fsdp2 import decoder_layers

        compile_layers(decoder_layers(model))
    return strategy, model, strategy.wrap(model, lazy)


def make_model(
    config: RunConfig, plan: Plan, initial: Mapping[str, torch.Tensor] | None = None
) -> tuple[nn.Module, LazyWeights | None]:
    """The model with its adapter, ready for training; under fsdp2 its weights stay in their files where they can.

    An adapter's own first weights are drawn as ever: they are the same however many processes there are; of a resumed
    run whose adapter began with a part of the base weights, they are ``initial``.

    Returns:
        the model, and where its weights are if they have not been read.

    Raises:
        HalftuneError: as ``load_model`` and ``attach_adapter``.
    """
    heartbeat.beat(plan.memory.weights)
    if plan.distribution.value == "fsdp2":
        from halftune.model.load import lazy_weights  # few runs share weights

        why = needs_whole_weights(config) or lazy_weights.why_not()
        if not why:
            lazy = lazy_weights.LazyWeights()
            model = _attached(config, plan, initial, lazy)
            if not (name := lazy.lacks(model)):
                return model, lazy
            why = f"{name} is not in its files under a name by which it could be read alone"
        log.warning("each process reads the whole model into main memory before it keeps its share: %s", why)
    return _attached(config, plan, initial), None


def _attached(
    config: RunConfig, plan: Plan, initial: Mapping[str, torch.Tensor] | None, lazy: LazyWeights | None = None
) -> nn.Module:
    seed, revision = config.training.seed, config.model.revision
    loaded: nn.Module = load_model(config.model, plan, lazy=lazy, seed=seed)
    if config.training.router_aux_loss_coef:
        check_router_loss(loaded)
    if lazy is None or config.adapter.type == "none":
        return attach_adapter(loaded, config.adapter, plan, seed, revision=revision, initial=initial)
    from halftune.model.load.zero_weights import insert_zero_weights, remove_zero_weights

    there = insert_zero_weights(loaded)
    model = attach_adapter(loaded, config.adapter, plan, seed, revision=revision, initial=initial)
    remove_zero_weights(model, there, lazy)
    return model


def media_inputs(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> MediaProcessor | None:
    """What makes the model's inputs from images; None without ``data.images``."""
    settings = media_of(config)
    if settings is None:
        return None
    from halftune.data.media.processor import MediaProcessor  # few runs have images

    return MediaProcessor(settings, tokenizer)


def feed_of(
    config: RunConfig,
    plan: Plan,
    accelerator: Accelerator,
    data: PreparedData,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
) -> Feed:
    """The batches of this process, with features of images in place of their pixels where the plan keeps them.

    Raises:
        ConfigError: there are none.
        DataError: an image is damaged, or changed since it was tokenised.
    """
    device = accelerator.device if accelerator.device.type == "cuda" else None
    rank, processes = accelerator.process_index, accelerator.num_processes
    method = make_method(config.method)
    given = (data.train, config, plan.batch, method, padding_id(model, tokenizer), rank, processes, device)
    if data.stream is None:
        feed = Feed(*given, images=media_inputs(config, tokenizer))
    else:
        from halftune.train.batches.stream_feed import StreamFeed  # few runs stream

        check = partial(check_split, model, tokenizer, key="data.train")
        feed = StreamFeed(*given, stream=data.stream, check=check)
    if feed.total_steps() == 0 or feed.steps_in(0) == 0:
        raise ConfigError("there is nothing to train on", remedy="look at `halftune data`", code="data.nothing_left")
    if feed.images is not None and plan.distribution.value == "fsdp2":
        from halftune.train.batches.absent_media import call_all_towers  # few runs have images

        call_all_towers(model, feed.images, tokenizer, data, accelerator.device)
    if feed.images is None or plan.features is None or not plan.features.value:
        return feed
    from halftune.train.batches.features import with_features  # few runs have images

    return with_features(feed, model, plan, data, accelerator)


def evidence(config: RunConfig, plan: Plan, resume_from: Path | None) -> Evidence:
    """What is to be known before the plan is final."""
    asked = config.data.packing.enabled is True
    packing = check_packing(config.model, plan) if plan.batch.packing.value else None
    teacher = config.method.teacher_model
    if packing is not None and packing.value and teacher is not None and plan.teacher is not None:
        packing = check_packing(teacher, plan.teacher)
    return Evidence(packing, packing_asked=asked, resumed=None if resume_from is None else resumed_batch(resume_from))


def check_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase, data: PreparedData) -> None:
    """Makes sure that the model has an embedding for every token that it will be given.

    Raises:
        ModelError: one has none.
    """
    for split, key in ((data.train, "data.train"), (data.eval, "data.eval")):
        if split is not None:
            check_split(model, tokenizer, split, key)


def check_split(model: nn.Module, tokenizer: PreTrainedTokenizerBase, split: TokenizedSplit, key: str) -> None:
    """As :func:`check_tokens`, for the samples of the data that ``key`` names."""
    examples = (split.example(index) for index in range(len(split)))
    check_ids(model, tokenizer, (one.input_ids for each in examples for one in each.segments), key)


def fuse_layers(model: nn.Module, plan: Plan) -> None:
    """Computes the layers that an operator knows by that operator, where the plan says so; says what was done."""
    choice = plan.batch.fused_layers
    log.info("fused layers: %s", fuse(model) if choice.value else f"none, {choice.reason}")


def check_packing(model: ModelSection, plan: Plan) -> Choice[bool]:
    """Whether a small copy of the model keeps the samples of a row apart."""
    folder = locate(model)
    config = read_config(folder, trust_remote_code=model.trust_remote_code)
    return packing_verdict(config, plan, small_multimodal_copy if is_multimodal(folder, model) else None)
