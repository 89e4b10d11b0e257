"""From a config and its plan to objects that can train: tokenizer, data, model, adapter, optimizer, feed."""

from __future__ import annotations

from collections.abc import Callable
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
from halftune.data.pipeline import PreparedData, prepare
from halftune.methods import make_method
from halftune.model.architectures import is_multimodal, read_config
from halftune.model.fused import fuse
from halftune.model.locate import images_of, locate
from halftune.model.packing_check import packing_verdict
from halftune.model.tokenizer import load_tokenizer
from halftune.model.towers import small_multimodal_copy
from halftune.model.vocabulary import check_ids, padding_id
from halftune.optim import make_optimizer
from halftune.plan import Plan
from halftune.plan.finalise import Evidence, finalise
from halftune.precision.report import check_dtypes
from halftune.train.callbacks.base import Phase
from halftune.train.checkpoint import first_weights
from halftune.train.feed import Feed
from halftune.train.folder import RunFolder
from halftune.train.numeric_environment import seed_everything, set_rounding
from halftune.train.parallel import make_strategy
from halftune.train.parallel.reading import make_model
from halftune.train.parallel.strategy import Strategy
from halftune.train.processes import check_agreed, keep_freed_memory, make_accelerator
from halftune.train.resume import check_same_data, choose_checkpoint, position, resumed_batch
from halftune.train.run_inputs import UNCHANGED, check_same_inputs, contents, run_inputs, template_date
from halftune.train.schedule import make_schedule
from halftune.train.state import TrainState

if TYPE_CHECKING:
    from halftune.data.media.processor import ImageProcessor
    from halftune.train.teacher import Teacher

log = get_logger(__name__)


def build(
    loaded: LoadedConfig, plan: Plan, folder: RunFolder, phase: Callable[[Phase], None] = lambda _: None
) -> TrainState:
    """Builds a run's state: data first, before any process group exists, then the model with the plan's dtypes.

    Args:
        loaded, plan: what was asked and what was decided.
        folder: the run folder, and what is known of the checkpoint that is resumed from.
        phase: told what comes next.

    Raises:
        HalftuneError: data, model, adapter or checkpoint are wrong; nothing in the run folder has changed.
    """
    config = loaded.run
    phase("tokenising")
    tokenizer = check_models(config)
    data = prepare(config, tokenizer, template_date(folder.path, folder.resume_from), images_of(config))
    phase("loading")
    accelerator = make_accelerator(plan)
    inputs = run_inputs(config.model, config.adapter, config.method, tokenizer, data)
    check_agreed(accelerator, "base model, tokenizer or data file", contents(inputs))
    resume_from, changes = choose_checkpoint(folder, accelerator.num_processes), UNCHANGED
    if resume_from is not None:
        changes = check_same_inputs(inputs, config.training.allow_changes, resume_from)
    plan = finalise(plan, evidence(config, plan, resume_from))
    set_rounding(plan.precision.tf32.value, config.training.deterministic)
    compile_ahead(config, plan, accelerator.device, phase)
    teacher = place_teacher(config, plan, accelerator.device, tokenizer, data)
    strategy, model, wrapped = place_model(config, plan, accelerator, tokenizer, data, resume_from)
    feed = make_feed(config, plan, accelerator, data, padding_id(model, tokenizer), image_inputs(config, tokenizer))
    check_agreed(accelerator, "training data", feed.fingerprint())
    total, optimizer = feed.total_steps(), make_optimizer(model, config.training, plan.precision, config.adapter)
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
    if run.config.method.generates:
        from halftune.train.rollout import Rollouts  # few runs answer prompts

        run.rollouts = Rollouts(run)
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
        model.compile()
    return strategy, model, strategy.wrap(model, lazy)


def image_inputs(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor | None:
    """What makes the model's inputs from images; None without ``data.images``."""
    settings = images_of(config)
    if settings is None:
        return None
    from halftune.data.media.processor import ImageProcessor  # few runs have images

    return ImageProcessor(settings, tokenizer)


def make_feed(
    config: RunConfig,
    plan: Plan,
    accelerator: Accelerator,
    data: PreparedData,
    pad_token_id: int,
    images: ImageProcessor | None = None,
) -> Feed:
    """The batches of this process.

    Raises:
        ConfigError: there are none.
    """
    device = accelerator.device if accelerator.device.type == "cuda" else None
    rank, processes = accelerator.process_index, accelerator.num_processes
    method = make_method(config.method)
    feed = Feed(data.train, config, plan.batch, method, pad_token_id, rank, processes, device, images=images)
    if feed.total_steps() == 0 or feed.steps_in(0) == 0:
        raise ConfigError("there is nothing to train on", remedy="look at `halftune data`", code="data.nothing_left")
    return feed


def evidence(config: RunConfig, plan: Plan, resume_from: Path | None) -> Evidence:
    """What is to be known before the plan is final."""
    asked = config.data.packing.enabled is True
    packing = check_packing(config.model, plan) if plan.batch.packing.value else None
    teacher = config.method.teacher_model
    if packing is not None and packing.value and teacher is not None and plan.teacher is not None:
        packing = check_packing(teacher, plan.teacher)
    return Evidence(packing, packing_asked=asked, resumed=None if resume_from is None else resumed_batch(resume_from))


def compile_ahead(config: RunConfig, plan: Plan, device: torch.device, phase: Callable[[Phase], None]) -> None:
    """Compiles the kernels of linear-attention layers, where there are any, while the device is still empty.

    Every process does so for its own device: which kernels are right is found there, and Triton's cache, which they
    share, is whole at every moment.

    Raises:
        PlanError: a kernel does not run here.
    """
    if plan.attention.linear.value != "halftune":
        return
    from halftune.model.compile_kernels import compile_kernels, kernels_to_compile  # imports the operators

    if device.type != "cpu":
        phase("compiling")
    model_config = read_config(locate(config.model), trust_remote_code=config.model.trust_remote_code)
    if operators := kernels_to_compile(model_config, plan, device):
        seconds = compile_kernels(model_config, plan, device, frozen=config.adapter.type != "none")
        log.info("kernels: %s compiled in %.1f s, or found in Triton's cache", ", ".join(operators), seconds)
    if device.type != "cpu":
        phase("loading")


def check_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase, data: PreparedData) -> None:
    """Makes sure that the model has an embedding for every token that it will be given.

    Raises:
        ModelError: one has none.
    """
    for split, key in ((data.train, "data.train"), (data.eval, "data.eval")):
        if split is not None:
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
