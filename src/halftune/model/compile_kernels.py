"""Compiles and proves the kernels of linear-attention layers before training, so that no step waits for a compiler."""

from __future__ import annotations

import time
import traceback
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from halftune.attention.linear import operators_of
from halftune.core.errors import PlanError
from halftune.core.log import get_logger
from halftune.model.damage import first_line
from halftune.model.packing_check import REFUSALS, packed_row, shrunken, silent
from halftune.model.patch import registered_attention
from halftune.model.patch_linear import routed_linear_layers
from halftune.plan import Plan
from halftune.precision.dtypes import autocast, stays_fp32, torch_dtype
from halftune_kernels.dispatch import choose
from halftune_kernels.selfcheck import failures

log = get_logger(__name__)
# Triton compiles a kernel once more for numbers that are multiples of 16, as the tokens of a row may be or not.
_ROWS = ((64, 16), (64, 13))


def kernels_to_compile(model_config: PretrainedConfig, plan: Plan, device: torch.device) -> tuple[str, ...]:
    """The operators of the model's layers that Triton computes on ``device``; empty where there are none.

    An operator that must prove itself on this GPU with this Triton does so here, unless its verdict is kept on disk.
    """
    if plan.attention.linear.value != "halftune":
        return ()
    dtype, found = torch_dtype(plan.precision.compute.value), []
    for operator in operators_of(model_config.get_text_config(decoder=True).model_type):
        backend = choose(operator, device, dtype)
        if backend.name == "triton":
            found.append(operator)
        elif device.type != "cpu":
            log.warning("%s is computed by %s: %s", operator, backend.name, backend.reason)
    return tuple(found)


def compile_kernels(model_config: PretrainedConfig, plan: Plan, device: torch.device, *, frozen: bool) -> float:
    """Runs one layer of each kind, with the model's widths and heads and random weights, forward and backward.

    Exactly the kernels that a training step and an evaluation start are then compiled, and kept in Triton's own cache:
    sizes of heads, dtypes and which operands there are go into what is compiled. The copy is gone when it returns.

    Args:
        model_config: of the model that is to be trained.
        plan: its number formats, attention and packing.
        device: where it trains.
        frozen: whether the model's own weights are frozen, beside an adapter.

    Returns:
        Seconds.

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
                for lengths in _ROWS:
                    _run(model, plan, device, lengths)
        except failures() as error:
            if _of_triton(error):
                what = f"a Triton kernel of the linear-attention layers does not run here: {first_line(error)}"
                raise PlanError(what, remedy=_remedy(error)) from error
            log.warning("kernels are compiled in the first steps: ahead of them, %s", first_line(error))
        except REFUSALS as error:  # a copy that cannot be made is no reason not to train
            log.warning("kernels are compiled in the first steps: ahead of them, %s", first_line(error))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return time.perf_counter() - start


def _of_triton(error: BaseException) -> bool:
    """Whether Triton raised it, or something that it called: a step would meet it too."""
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.partition(".")[0] == "triton" for name in (type(error).__module__, *frames))


def _remedy(error: BaseException) -> str:
    if type(error).__module__.startswith("triton."):
        return "set HALFTUNE_KERNELS=torch, and please report it"
    return "Triton needs a C compiler and Python's headers (apt install gcc python3-dev); or set HALFTUNE_KERNELS=torch"


def _copy(model_config: PretrainedConfig, plan: Plan, device: torch.device, *, frozen: bool) -> PreTrainedModel:
    text = model_config.get_text_config(decoder=True)
    small = type(text).from_dict(shrunken(text, narrow=False))
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
    """An evaluation of a row of ``lengths``, then a forward and backward pass as training has them."""
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
