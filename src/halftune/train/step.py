"""One optimizer step: the loss of the whole global batch, its gradient, clipping, the update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from halftune.data.batch import Batch
from halftune.methods import Loss
from halftune.model.policy import PolicyModel
from halftune.precision.dtypes import autocast
from halftune.train.callbacks.base import Averages, StepMetrics
from halftune.train.callbacks.nonfinite import check_finite
from halftune.train.memory import peak_memory_bytes
from halftune.train.parallel.watchdog import tick
from halftune.train.processes import sum_over_processes
from halftune.train.state import TrainState
from halftune.train.step_recovery import memory_error, out_of_memory


def train_step(run: TrainState, batches: list[Batch]) -> StepMetrics:
    """Trains on one global batch, of which these are this process's micro-batches.

    The loss is the sum over its examples divided by the sum of their weights, over all micro-batches and processes: how
    the batch is split changes nothing but rounding.

    Raises:
        NonFiniteStep: loss or gradient are not finite; the weights are as they were.
        TrainingError: memory ran out while the weights were updated.
    """
    counts = [[batch.fed, batch.real, batch.trained, batch.weight] for batch in batches]
    *tokens, weight = sum_over_processes(run.accelerator, [sum(column) for column in zip(*counts, strict=True)])
    # Gradients are averaged over processes; the loss wants their sum.
    scale = run.processes / (weight or 1.0)
    losses = []
    for index, batch in enumerate(batches):
        with run.strategy.accumulating(run.wrapped, last=index == len(batches) - 1):
            with forward_pass(run):
                loss = run.method.loss(PolicyModel(run.wrapped, scale), batch.to(run.device))
            run.scaler.scale(loss.total * scale).backward()
        losses.append(Loss(loss.total.detach(), loss.metrics))
    total, averages = summed(run, losses)
    run.scaler.unscale_(run.optimizer)
    norm = run.strategy.gradient_norm(run.trainable, run.config.training.max_grad_norm)
    extra = {"skipped": 0.0} if run.config.training.on_non_finite == "skip" else {}
    fed, real, trained = map(int, tokens)
    metrics = StepMetrics(
        total / (weight or 1.0), run.rate, norm, fed, real, trained, 0.0, 0, extra, weight=weight, averages=averages
    )
    _check(run, metrics, batches)
    try:
        _update(run, metrics)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise memory_error(run, error, updating=True) from error
    metrics.memory_bytes = peak_memory_bytes(run.device)
    return metrics


@contextmanager
def forward_pass(run: TrainState) -> Iterator[None]:
    """Around the loss of a micro-batch: the plan's autocast, and signs of life."""
    tick()
    with autocast(run.plan.precision, run.device):
        yield
    tick()  # one that waits in the backward pass is further than one that hangs before


def summed(run: TrainState, losses: Sequence[Loss]) -> tuple[float, Averages]:
    """Totals and metrics of micro-batches, summed over them and over all processes; the device is waited for once."""
    names = run.method.metrics
    rows = [torch.stack([one.total, *(x for name in names for x in one.metrics[name])]) for one in losses]
    local = torch.stack(rows).cpu().double().sum(0).tolist() if rows else [0.0] * (1 + 2 * len(names))
    total, *sums = sum_over_processes(run.accelerator, local)
    return total, {name: (sums[2 * index], sums[2 * index + 1]) for index, name in enumerate(names)}


def _check(run: TrainState, metrics: StepMetrics, batches: list[Batch]) -> None:
    def again(batch: Batch) -> torch.Tensor:
        with forward_pass(run):
            return run.method.loss(PolicyModel(run.model), batch.to(run.device)).total

    # An overflow of scaled gradients is the scaler's daily business: it skips the update and lowers the scale.
    norm = 0.0 if run.scaler.is_enabled() else metrics.grad_norm
    check_finite(run, metrics.loss, norm, batches, again, lambda part: run.feed.where(batches[part]))


def _update(run: TrainState, metrics: StepMetrics) -> None:
    updated = True
    if run.scaler.is_enabled():
        before = run.scaler.get_scale()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        scale = run.scaler.get_scale()
        updated = scale >= before
        metrics.extra |= {"loss_scale": scale, "skipped": float(not updated)}
    else:
        run.optimizer.step()
    if updated:
        run.schedule.step()
    run.optimizer.zero_grad(set_to_none=True)
