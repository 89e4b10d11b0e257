"""Steps of other tools on fake CUDA tensors, to compare with: transformers with peft, and NeMo AutoModel's LoRA recipe.

What they share: transformers' model and attention by SDPA, logits of all tokens, cross-entropy in fp32, AdamW with one
kernel. Every row is full and every token labelled, so that no mask is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional as F

from halftune.bench.paper.fake_cuda import CUDA, fake_cuda, move
from halftune.bench.paper.micro_batches import MicroBatches
from halftune.bench.paper.recorder import Recorder
from halftune.bench.paper.step import Recorded, built_on_paper, check_supported, ranks
from halftune.config.run import RunConfig
from halftune.config.sections.model import LoraAdapter
from halftune.core.errors import PlanError
from halftune.hardware import Device
from halftune.model.attention.register import registered_attention
from halftune.model.fused import norms
from halftune.model.load.load import recompute_activations
from halftune.model.meta.model import prepare
from halftune.plan import Plan
from halftune.precision.dtypes import autocast

_MAX_NORM = 1.0


class _TritonLora(torch.autograd.Function):
    """An adapter's output by one kernel; its gradients by two, as in AutoModel (``components/_peft/lora.py``)."""

    @staticmethod
    def forward(ctx: Any, x: Any, a: Any, b: Any, recorder: Recorder) -> Any:
        """``[..., O]`` of ``x [..., I]``, ``a [R, I]`` and ``b [O, R]``."""
        ctx.save_for_backward(x, a, b)
        ctx.recorder = recorder
        out = x.new_empty(*x.shape[:-1], b.shape[0])
        recorder.triton("lora_forward", (x, a, b, out))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of ``x``, ``a`` and ``b``."""
        (gradient,), (x, a, b) = gradients, ctx.saved_tensors
        dx, da, db = torch.empty_like(x), torch.empty_like(a), torch.empty_like(b)
        ctx.recorder.triton("lora_db", (gradient, x, a, db))
        ctx.recorder.triton("lora_da_dx", (gradient, x, a, b, dx, da))
        return dx, da, db, None


def _transformers(config: RunConfig, plan: Plan, model: Any, mode: Any, _recorder: Recorder) -> Any:
    """With peft as it comes: activations are cast to the adapters' fp32, and W + B·A is computed for experts."""
    adapted = prepare(model, config, plan, mode)
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = True  # pyright: ignore[reportArgumentType]
        vars(module).pop("_activate_lora", None)  # that of multiply_beside_weights
    return adapted


def _automodel(config: RunConfig, _plan: Plan, model: Any, _mode: Any, recorder: Recorder) -> Any:
    """With a fused norm, and adapters in the model's dtype by Triton kernels (``use_triton: true``)."""
    model.config.use_cache = False
    model.requires_grad_(False).train()
    rank = config.adapter.rank if isinstance(config.adapter, LoraAdapter) else 0
    for name, module in list(model.named_modules()):
        if norms.candidates(module):
            module.forward = norms.FusedNorm(module, norms.Form(0.0, promotes=True)).forward
        elif isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            _adapt(module, rank, recorder)
    return model


def _adapt(linear: nn.Linear, rank: int, recorder: Recorder) -> None:
    weight = linear.weight
    linear.lora_A = nn.Parameter(weight.new_empty(rank, linear.in_features))
    linear.lora_B = nn.Parameter(weight.new_empty(linear.out_features, rank))

    def forward(input: torch.Tensor) -> Any:
        adapted = _TritonLora.apply(input, linear.lora_A, linear.lora_B, recorder)
        return F.linear(input, linear.weight, linear.bias) + adapted

    linear.forward = forward


PEERS: dict[str, Callable[..., Any]] = {"transformers": _transformers, "automodel": _automodel}


def record_peer(name: str, config: RunConfig, plan: Plan, device: Device, *, sample: int | None = None) -> Recorded:
    """Record the second step of another tool with the same model, adapter, samples, accumulation and checkpointing.

    Samples of a packed row are rows of their own.

    Args:
        name: one of ``PEERS``.
        config, plan: of halftune's run.
        device: the planned GPU.
        sample: tokens of every sample, as for ``record_step``.

    Raises:
        PlanError: no step like it: the loss is not that of next tokens, the adapter is not plain LoRA, or packed rows
            hold samples of two lengths.
    """
    check_supported(config, plan, device)
    if config.method.segments != 1 or not isinstance(config.adapter, LoraAdapter):
        what = "--compare knows LoRA with the loss of next tokens"
        raise PlanError(what, where="--compare", remedy="leave --compare out", code="bench.paper_unsupported")
    recorder = Recorder(ranks(config))
    longest, rows = config.data.max_length, plan.batch.micro_batch
    length = min(sample or longest, longest)
    if plan.batch.packing.value:
        rows, rest = divmod(rows * longest, length)
        if rest:
            what = f"--compare knows samples of one length; {length:,} tokens do not fill a row"
            remedy = f"use a divisor of {longest:,} (data.max_length)"
            raise PlanError(what, where="--sample-length", remedy=remedy, code="bench.paper_unsupported")
    shape = (plan.batch.accumulation, rows, length)
    with torch.random.fork_rng(devices=[]), fake_cuda(recorder, device) as mode, registered_attention(plan):
        built = built_on_paper(config, plan, "sdpa")
        if plan.batch.gradient_checkpointing.value:
            recompute_activations(built)
        model = PEERS[name](config, plan, built, mode, recorder)
        move(model)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        half = name == "transformers" and plan.precision.autocast.value
        with recorder.watching(model):
            _step(model, trained, optimizer, shape, plan if half else None, recorder)
            with recorder.recording():
                _step(model, trained, optimizer, shape, plan if half else None, recorder)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
    made = recorder.launches, recorder.syncs, recorder.calls
    many, rows, length = shape
    return Recorded(*made, math.prod(shape), many * rows * (length - 1), length, layers, name, recorder.peak, shape[0])


def _step(
    model: Any, trained: list[Any], optimizer: Any, shape: tuple[int, int, int], plan: Plan | None, recorder: Recorder
) -> None:
    """Forward and backward of every micro-batch, clipping and one update, under the plan's autocast if one is given."""
    micro_batches = MicroBatches(recorder)
    for ids in torch.zeros(shape, dtype=torch.long, device=CUDA):
        with micro_batches.one() as runs:
            if runs:
                _micro_batch(model, ids, shape[0], plan)
    nn.utils.clip_grad_norm_(trained, _MAX_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _micro_batch(model: Any, ids: torch.Tensor, many: int, plan: Plan | None) -> None:
    with nullcontext() if plan is None else autocast(plan.precision, CUDA):
        logits = model(input_ids=ids).logits
    loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    (loss / many).backward()
