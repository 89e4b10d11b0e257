"""Compiles and verifies the kernels of linear-attention layers before training."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from halftune.config.facts.families import family_of
from halftune.core.errors import PlanError
from halftune.core.log import get_logger
from halftune.model.attention.linear import routed_linear_layers
from halftune.model.attention.packing_check import REFUSALS, packed_row, shrunk_config, silent
from halftune.model.attention.register import registered_attention
from halftune.model.files.load_errors import first_line
from halftune.plan import Plan
from halftune.precision.dtypes import autocast, stays_fp32, torch_dtype
from halftune_kernels.dispatch import choose, prove
from halftune_kernels.selfcheck import failures

log = get_logger(__name__)
# Triton compiles a second variant for sizes that are multiples of 16; row lengths may be either.
_ROWS = ((64, 16), (64, 13))
_PATIENCE = 300.0  # seconds; the watchdog of a run has twice as many


def kernels_to_compile(model_config: PretrainedConfig, plan: Plan, device: torch.device) -> tuple[str, ...]:
    """Names of the model's operators with Triton kernels on ``device``; may be empty.

    Runs the self-check of operators that need one on this GPU and Triton version, unless its result is cached.
    """
    if plan.attention.linear.value != "halftune":
        return ()
    dtype, found = torch_dtype(plan.precision.compute.value), []
    operators = family_of(model_config.get_text_config(decoder=True).model_type).operators
    prove(operators, device, dtype)
    for operator in operators:
        backend = choose(operator, device, dtype)
        if backend.name == "triton":
            found.append(operator)
        elif device.type != "cpu":
            log.warning("%s runs on backend %s: %s", operator, backend.name, backend.reason)
    return tuple(found)


def compile_kernels(model_config: PretrainedConfig, plan: Plan, device: torch.device, *, frozen: bool) -> float:
    """Run one layer of each kind, with the model's sizes and random weights, forward and backward.

    This compiles exactly the kernels of training and evaluation into Triton's cache: head sizes, dtypes and operands
    select the compiled variant. Of the processes that share the cache one compiles. The copy is freed on return.

    Args:
        model_config: config of the model to train.
        plan: number formats, attention and packing.
        device: training device.
        frozen: whether the base weights are frozen (adapter training).

    Returns:
        Seconds taken.

    Raises:
        PlanError: a kernel does not compile, or does not fit this GPU.
    """
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            with silent():
                model = _copy(model_config, plan, device, frozen=frozen)
            with registered_attention(plan) as name, routed_linear_layers(model, plan):
                model.set_attn_implementation(name)
                with first_alone():
                    for lengths in _ROWS:
                        _run(model, plan, device, lengths)
        except failures() as error:
            if _of_triton(error):
                what = f"a Triton kernel of the linear-attention layers failed: {first_line(error)}"
                raise PlanError(what, remedy=_remedy(error), code="attention.kernel_failed") from error
            log.warning("cannot compile kernels before training (%s); the first steps will", first_line(error))
        except REFUSALS as error:  # train even if the small copy cannot be built
            log.warning("cannot compile kernels before training (%s); the first steps will", first_line(error))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return time.perf_counter() - start


@contextmanager
def first_alone() -> Iterator[None]:
    """Inside, one process fills Triton's cache; those that come meanwhile wait for it, then read the cache at once."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / "halftune.lock")
            try:
                stack.enter_context(lock.acquire(blocking=False))
            except Timeout:
                with lock.acquire(timeout=_PATIENCE):
                    pass
        except OSError:
            pass  # no cache that could be written, or no end of the first: this process compiles for itself
        yield


def _of_triton(error: BaseException) -> bool:
    """Whether Triton, or code called by it, raised the error: training would fail too."""
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.partition(".")[0] == "triton" for name in (type(error).__module__, *frames))


def _remedy(error: BaseException) -> str:
    if type(error).__module__.startswith("triton."):
        return "set HALFTUNE_KERNELS=torch, and please report it"
    return "install a C compiler and Python headers (apt install gcc python3-dev), or set HALFTUNE_KERNELS=torch"


def _copy(model_config: PretrainedConfig, plan: Plan, device: torch.device, *, frozen: bool) -> PreTrainedModel:
    text = model_config.get_text_config(decoder=True)
    small = type(text).from_dict(shrunk_config(text, narrow=False))
    remote = type(text).__module__.startswith("transformers_modules")  # its code was allowed to load the model already
    with device:
        model: Any = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=remote
        )
    stored = torch_dtype((plan.precision.storage if frozen else plan.precision.trainable).value)
    for name, parameter in model.named_parameters():
        if not stays_fp32(name, parameter, plan.precision.keep_fp32.value):
            parameter.data = parameter.data.to(stored)
        parameter.requires_grad_(not frozen)
    return model


def _run(model: PreTrainedModel, plan: Plan, device: torch.device, lengths: tuple[int, ...]) -> None:
    """Run an evaluation forward pass on a row of ``lengths``, then a training forward and backward pass."""
    ids = torch.zeros(1, sum(lengths), dtype=torch.long)
    row = packed_row(ids, lengths) if plan.batch.packing.value else {"input_ids": ids}
    given = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in row.items()}
    embedded = model.get_input_embeddings()(given.pop("input_ids")).detach().requires_grad_()
    with autocast(plan.precision, device):
        with torch.no_grad():
            model.eval()(inputs_embeds=embedded, use_cache=False, **given)
        logits = model.train()(inputs_embeds=embedded, use_cache=False, **given).logits
        loss = logits.float().square().mean()
    loss.backward()
