"""From a config and its plan to objects that can train: tokenizer, data, model, adapter, optimizer, feed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from halftune.config.load import LoadedConfig
from halftune.config.run import RunConfig
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ConfigError, PlanError
from halftune.core.log import get_logger
from halftune.data.pipeline import PreparedData, prepare
from halftune.model.architectures import is_multimodal, read_config
from halftune.model.compile_kernels import compile_kernels, kernels_to_compile
from halftune.model.fused import fuse
from halftune.model.locate import locate
from halftune.model.packing_check import packing_verdict
from halftune.model.tokenizer import load_tokenizer
from halftune.model.towers import small_whole
from halftune.model.vocabulary import check_ids, padding_id
from halftune.plan import Plan
from halftune.precision.report import check_dtypes
from halftune.train.callbacks.base import Phase, Run
from halftune.train.checkpoint import Trained
from halftune.train.feed import Feed
from halftune.train.made_of import contents, made_of
from halftune.train.memory import keep_freed_memory
from halftune.train.optim import make_optimizer
from halftune.train.parallel import make_strategy
from halftune.train.parallel.reading import make_model
from halftune.train.parallel.strategy import Strategy
from halftune.train.processes import check_agreed, make_accelerator
from halftune.train.random_state import seed_everything, set_rounding
from halftune.train.schedule import make_schedule

log = get_logger(__name__)


@dataclass
class Session:
    """What a run trains with; ``run`` is the part of it that callbacks see."""

    accelerator: Accelerator
    strategy: Strategy
    run: Run
    data: PreparedData
    feed: Feed
    eval_feed: Feed | None
    wrapped: nn.Module
    trained: Trained


def build(
    loaded: LoadedConfig,
    plan: Plan,
    folder: Path,
    phase: Callable[[Phase], None] = lambda _: None,
    settle: Callable[[Plan, dict[str, Any]], Plan] = lambda plan, _: plan,
) -> Session:
    """Builds a session: data first, before any process group exists, then the model with the plan's dtypes.

    Args:
        loaded, plan: what was asked and what was decided.
        folder: the run folder.
        phase: told what comes next.
        settle: called when processes can talk, with what the run is made of, before the model is read; what they go on
            from may change how they share a global batch.

    Raises:
        HalftuneError: whatever is wrong with data, model or adapter; nothing has been trained.
    """
    config = loaded.run
    phase("tokenising")
    tokenizer = load_tokenizer(config.model)
    data = prepare(config, tokenizer)
    phase("loading")
    accelerator = make_accelerator(plan)
    made = made_of(config.model, tokenizer, data)
    check_agreed(accelerator, "base model, tokenizer or data file", contents(made))
    plan = settle(plan, made)
    plan = settle_packing(config.model, plan, explicit=config.data.packing.enabled is True)
    set_rounding(plan.precision.tf32.value, config.training.deterministic)
    compile_ahead(config, plan, accelerator.device, phase)
    model, unread = make_model(config, plan)
    check_tokens(model, tokenizer, data)
    pad_token_id = padding_id(model, tokenizer)
    check_dtypes(model, plan.precision)
    seed_everything(config.training.seed + accelerator.process_index)  # every process its own dropout
    strategy = make_strategy(accelerator, plan)
    strategy.place(model, unread)
    fuse_layers(model, plan)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    if config.training.torch_compile:
        model.compile()
    wrapped = strategy.wrap(model, unread)
    rank, world = accelerator.process_index, accelerator.num_processes
    device = accelerator.device if accelerator.device.type == "cuda" else None
    feed = Feed(data.train, config, plan.batch, plan.batch.packing.value, pad_token_id, rank, world, device)
    eval_feed = feed.for_evaluation(data.eval, config.training.per_device_eval_batch_size) if data.eval else None
    check_agreed(accelerator, "training data", feed.fingerprint())
    total, per_epoch = feed.total_steps(), feed.steps_in(0)
    if total == 0 or per_epoch == 0:
        raise ConfigError("there is nothing to train on", remedy="look at `halftune data`")
    optimizer = make_optimizer(model, config.training, plan.precision)
    scaler = torch.amp.GradScaler(accelerator.device.type, enabled=plan.precision.grad_scaler.value)
    trained = Trained(model, optimizer, make_schedule(config.training, optimizer, total), scaler)
    main = accelerator.is_main_process
    run = Run(config, plan, folder, model, tokenizer, accelerator.device, main, total, per_epoch, made_of=made)
    return Session(accelerator, strategy, run, data, feed, eval_feed, wrapped, trained)


def compile_ahead(config: RunConfig, plan: Plan, device: torch.device, phase: Callable[[Phase], None]) -> None:
    """Compiles the kernels of linear-attention layers, where there are any, while the device is still empty.

    Every process does so for its own device: which kernels are right is found there, and Triton's cache, which they
    share, is whole at every moment.

    Raises:
        PlanError: a kernel does not run here.
    """
    if plan.attention.linear.value != "halftune":
        return
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
            check_ids(model, tokenizer, (split.sample(index).input_ids for index in range(len(split))), key)


def fuse_layers(model: nn.Module, plan: Plan) -> None:
    """Computes the layers that an operator knows by that operator, where the plan says so; says what was done."""
    choice = plan.batch.fused_layers
    log.info("fused layers: %s", fuse(model) if choice.value else f"none, {choice.reason}")


def settle_packing(model: ModelSection, plan: Plan, *, explicit: bool) -> Plan:
    """The plan, without packing where the check on a small copy of the model shows that samples would mix.

    Raises:
        PlanError: packing was asked for explicitly and the check failed.
    """
    if not plan.batch.packing.value:
        return plan
    folder = locate(model)
    config = read_config(folder, trust_remote_code=model.trust_remote_code)
    verdict = packing_verdict(config, plan, small_whole if is_multimodal(folder, model) else None)
    if verdict.value:
        log.info("packing: %s", verdict.reason)
        return plan
    if explicit:
        raise PlanError(f"packing is not possible: {verdict.reason}", remedy="data.packing: false")
    log.warning("packing is off: %s", verdict.reason)
    return plan.unpacked(verdict.reason)
