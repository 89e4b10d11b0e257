"""One optimizer step (loss of the global batch, gradient, clipping, update), and the loss of the evaluation set.

A step measures everything in one vector on the device, which is read once. Where the run is late, that is done while
the next step runs, and the device itself leaves a step out that is not finite; see ``train.loop.stepper``. Where memory
runs out, the step is repeated with smaller micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.core.processes import heartbeat
from halftune.data.batch import Batch
from halftune.methods import AdapterOff, Loss, Reference
from halftune.model.policy.policy import PolicyModel
from halftune.optim.device_side import loss_scaling, scale_after, skipping
from halftune.precision.dtypes import autocast
from halftune.train.batches.feed import Feed
from halftune.train.callback import EVAL_SET, Averages, StepMetrics
from halftune.train.loop.nonfinite import NonFiniteStep, check_finite
from halftune.train.loop.out_of_memory import (
    UpdateOutOfMemory,
    first_line,
    free_memory,
    may_split,
    memory_error,
    out_of_memory,
    remedies,
    rows_of,
    smaller,
)
from halftune.train.parallel.processes import Readout, peak_memory_bytes, sum_over_processes, sum_tensor, wide
from halftune.train.run_folder.checkpoints import intact
from halftune.train.state import TrainState
from halftune.train.window import ratios


def evaluate(run: TrainState, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
    """``eval_loss`` over the evaluation split, and the method's metrics; the same for any number of processes.

    An evaluation set with a name is measured by itself: ``eval_loss_NAME`` is its loss. ``eval_loss`` is that of all
    samples together, each set weighted by its number of trained tokens, or by what the method counts.

    If memory runs out, ``run.eval_feed`` is replaced by one with smaller batches and the evaluation starts again.

    Args:
        run: its ``eval_feed`` is evaluated.
        should_stop: called before every batch; true stops the evaluation.

    Returns:
        the metrics; None if a process stopped the evaluation.

    Raises:
        TrainingError: memory runs out with one row, or on one process of several that share the weights.
    """
    while True:
        feed = run.eval_feed
        assert feed is not None
        try:
            return _measured(run, feed, should_stop)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            halved = smaller(feed.batch)
            # the others wait in the middle of this forward pass where each has a share of the weights
            if halved is None or run.config.training.on_out_of_memory == "stop" or run.strategy.sharded:
                less = "" if halved is None else "a smaller training.per_device_eval_batch_size, "
                raise TrainingError(
                    f"out of memory in the evaluation, {rows_of(feed.batch, 'at a time')}: {first_line(error)}",
                    remedy=f"{less}{remedies(run)}; {intact(run.folder)}",
                    code="train.out_of_memory",
                ) from error
        log.warning("out of memory in the evaluation: from now on %d rows at a time", halved.micro_batch)
        run.eval_feed = replace(feed, batch=halved)
        free_memory(run.device)


@torch.no_grad()
def _measured(run: TrainState, feed: Feed, should_stop: Callable[[], bool]) -> dict[str, float] | None:
    # By the model as built: processes may run different numbers of batches, and a wrapped one would wait for the
    # others. Where it is sharded, they run equally many and leave together.
    losses: dict[str, list[Loss]] = {name: [] for name in feed.sets}
    weights = dict.fromkeys(losses, 0.0)
    training = run.model.training
    run.model.eval()
    left, together = False, run.strategy.sharded
    feeds = ((name, batches) for name, one in feed.sets.items() for batches in one.once())
    try:
        for name, batches in feeds:
            left = should_stop()
            if together:
                left = sum_over_processes(run.accelerator, [float(left)])[0] > 0
            if left:
                break
            answered = batches if run.rollouts is None else run.rollouts(batches, feed)
            for batch in (one for one in answered if one.weight or together):
                with forward_pass(run):
                    losses[name].append(run.method.evaluate(*_asked(run, run.model, batch, run.eval_reference)))
                weights[name] += batch.weight
    finally:
        feeds.close()
        run.model.train(training)
        run.strategy.after_evaluation(run.model)
    *sums, leaving = sum_over_processes(run.accelerator, [*weights.values(), float(left)])
    found = [sum_losses(run, losses[name]) for name in losses]
    return None if leaving else _eval_metrics(dict(zip(weights, sums, strict=True)), found)


def _eval_metrics(weights: dict[str, float], found: Sequence[tuple[float, Averages]]) -> dict[str, float]:
    """Metrics from the weights of the evaluation sets, and their sums of losses and averages in the same order.

    The loss of a set without weight, such as one of prompts without a judged answer, is NaN.
    """
    totals = [total for total, _ in found]
    metrics = {"eval_loss": sum(totals) / (sum(weights.values()) or math.nan)}
    for (name, weight), total in zip(weights.items(), totals, strict=True):
        if name:
            metrics[f"{EVAL_SET}{name}"] = total / (weight or math.nan)
    return metrics | {f"eval_{name}": value for name, value in ratios([one for _, one in found]).items()}


log = get_logger(__name__)

# Factor of a loss whose weight over all processes is not known yet: a power of two, so that it rounds nothing.
_UNSCALED = 2.0**-10


def recover(run: TrainState, error: Exception, batches: list[Batch]) -> StepMetrics | None:
    """The metrics of a step whose update is skipped; None where ``run.feed`` now makes smaller micro-batches of it.

    Args:
        run: the run; the step has not changed its weights.
        error: what the step raised.
        batches: of the step.

    Raises:
        TrainingError: memory ran out and the batch may or can not be split; or a step that is not finite ends the run.
    """
    if isinstance(error, NonFiniteStep):
        if run.config.training.on_non_finite == "stop":
            raise error
        return _skipped(run, error, batches)
    if not out_of_memory(error):
        raise error
    before, halved = run.feed.batch, smaller(run.feed.batch)
    if halved is None or not may_split(run) or isinstance(error, UpdateOutOfMemory):
        raise memory_error(run, error) from error
    log.warning(
        "out of memory in step %d with a micro-batch of %d rows: now %d rows, and %d passes a step instead of %d; "
        "the global batch and the loss stay the same",
        run.step + 1,
        before.micro_batch,
        halved.micro_batch,
        halved.accumulation,
        before.accumulation,
    )
    run.feed = replace(run.feed, batch=halved)
    return None


def _skipped(run: TrainState, error: NonFiniteStep, batches: list[Batch]) -> StepMetrics:
    log.warning("%s: the update is skipped (training.on_non_finite: skip)", error.what)
    if run.scaler.is_enabled():
        run.scaler.update()  # it has unscaled, and will not do that twice
    run.optimizer.zero_grad(set_to_none=True)
    counts = [[batch.fed, batch.real] for batch in batches]
    fed, real = sum_over_processes(run.accelerator, [sum(column) for column in zip(*counts, strict=True)])
    memory = peak_memory_bytes(run.device)
    # it trained nothing, so the loss, which may be no number, weighs nothing where losses are averaged
    return StepMetrics(error.loss, run.rate, error.grad_norm, int(fed), int(real), 0, 0.0, memory, {"skipped": 1.0})


@dataclass
class StartedStep:
    """A step whose numbers are read later.

    Attributes:
        batches: micro-batches of this process, with the columns that the loss recorded.
        readout: what :func:`_numbers` measured over all processes, the gradient norm, and what ``scaler`` adds.
        counts: fed, real and trained tokens and weight of all processes; None where the readout has them.
        rate: learning rate.
        last: whether the schedule continues after it.
        stopping: whether a process has received a signal; known once the step is read.
    """

    batches: list[Batch]
    readout: Readout
    counts: list[float] | None
    rate: float
    last: bool
    stopping: bool = False


def start_step(run: TrainState, batches: list[Batch], *, last: bool = True, stop: bool = False) -> StartedStep:
    """Compute the gradient; where ``run.late``, update the weights too, unless the device finds it not finite.

    Loss = sum of the examples' losses / sum of their weights, over all micro-batches and processes. The split into
    micro-batches changes only the rounding. Waits for the device only where several processes do not run late.

    Args:
        run: the run.
        batches: micro-batches of this process.
        last: the schedule is updated with the weights.
        stop: this process has received a signal; the others learn it with the step's numbers.
    """
    own = [float(sum(getattr(one, name) for one in batches)) for name in ("fed", "real", "trained", "weight")]
    together = run.late and run.processes > 1
    counts = None if together else sum_over_processes(run.accelerator, own)
    # Gradients are averaged over processes; the loss wants their sum.
    scale = _UNSCALED if counts is None else run.processes / (counts[-1] or 1.0)
    losses, recorded = list[Loss](), list[Batch]()
    for index, batch in enumerate(batches):
        with run.strategy.accumulating(run.wrapped, last=index == len(batches) - 1):
            with forward_pass(run):
                loss = run.method.loss(*_asked(run, run.wrapped, batch, run.reference, scale))
            run.scaler.scale(loss.total * scale).backward()
        losses.append(Loss(loss.total.detach(), loss.metrics))
        recorded.append(replace(batch, columns={**batch.columns, **loss.columns}))
    numbers, factor = _numbers(run, losses, (*own, float(stop)) if together else ()), None
    if together:
        factor = run.processes / (scale * torch.where(numbers[-2] > 0, numbers[-2], 1.0))
    run.scaler.unscale_(run.optimizer)
    norm = run.strategy.gradient_norm(run.trainable, run.config.training.max_grad_norm, factor).to(numbers)
    measured = torch.cat([numbers, norm[None], *loss_scaling(run.scaler, run.optimizer, numbers)])
    started = StartedStep(recorded, Readout(measured), counts, run.rate, last)
    if run.late:
        run.broken = ~(torch.isfinite(numbers[0]) & torch.isfinite(norm)) | run.broken
        _update(run, last=last)
    return started


def finish_step(run: TrainState, started: StartedStep) -> StepMetrics:
    """Read what a step has measured, and update the weights unless :func:`start_step` has done so.

    Raises:
        NonFiniteStep: loss or gradient are not finite; the weights are as they were.
        UpdateOutOfMemory: memory ran out while the weights were updated.
    """
    values, names = started.readout.read(), run.method.metrics
    scaling = [values.pop() for _ in range(3)][::-1] if run.scaler.is_enabled() else []
    norm, counts = values.pop(), started.counts
    if counts is None:
        *values, fed, real, trained, weight, stops = values
        counts, started.stopping = [fed, real, trained, weight], stops > 0
    total, sums, weight = values[0], values[1:], counts[-1]
    averages = {name: (sums[2 * index], sums[2 * index + 1]) for index, name in enumerate(names)}
    extra = {"skipped": 0.0} if run.config.training.on_non_finite == "skip" else {}
    fed, real, trained = map(int, counts[:3])
    metrics = StepMetrics(
        total / (weight or 1.0), started.rate, norm, fed, real, trained, 0.0, 0, extra, weight=weight, averages=averages
    )
    _check(run, metrics, started.batches)
    updated = True
    if scaling:
        updated, after = scale_after(run.scaler, *scaling)
        metrics.extra |= {"loss_scale": after, "skipped": float(not updated)}
    if not run.late:
        _update(run, last=started.last and updated)
    metrics.memory_bytes = peak_memory_bytes(run.device)
    return metrics


def as_one(steps: list[StepMetrics]) -> StepMetrics:
    """Several updates as one step: mean losses and norms, sums of tokens and averages."""

    def total(name: str) -> Any:
        return sum(getattr(one, name) for one in steps)

    averages = {}
    for name in steps[0].averages:
        sums, counts = zip(*(one.averages[name] for one in steps), strict=True)
        averages[name] = (sum(sums), sum(counts))
    tokens = {name: total(name) for name in ("tokens", "tokens_real", "tokens_trained")}
    means = {name: total(name) / len(steps) for name in ("loss", "grad_norm")}
    return replace(steps[-1], **tokens, **means, averages=averages)


def _asked(
    run: TrainState, model: torch.nn.Module, batch: Batch, reference: Reference | None, scale: float = 1.0
) -> tuple[PolicyModel, Batch, Reference]:
    """What a method's loss is computed from."""
    training = run.config.training
    policy = PolicyModel(model, scale, training.label_smoothing, training.router_aux_loss_coef)
    return policy, batch.to(run.device), reference or AdapterOff(policy)


@contextmanager
def forward_pass(run: TrainState) -> Iterator[None]:
    """Run the forward pass of a micro-batch under the plan's autocast, with a heartbeat before and after."""
    heartbeat.tick()
    with autocast(run.plan.precision, run.device):
        yield
    heartbeat.tick()  # a rank in the backward pass is ahead of one that hangs in the forward pass


def _numbers(run: TrainState, losses: Sequence[Loss], known: Sequence[float] = ()) -> torch.Tensor:
    """Sums over micro-batches and processes: of the losses, each metric's sum and count, and numbers that are known.

    fp64 (fp32 on MPS).
    """
    names = run.method.metrics
    if losses:
        rows = [torch.stack([one.total, *(x for name in names for x in one.metrics[name])]) for one in losses]
        numbers = torch.stack(rows).to(wide(run.device)).sum(0)
    else:
        numbers = torch.zeros(1 + 2 * len(names), dtype=wide(run.device), device=run.device)
    if known:
        more = torch.tensor(known, dtype=numbers.dtype, pin_memory=numbers.device.type != "cpu")
        numbers = torch.cat([numbers, more.to(numbers.device, non_blocking=True)])
    return sum_tensor(run.accelerator, numbers)


def sum_losses(run: TrainState, losses: Sequence[Loss]) -> tuple[float, Averages]:
    """Sum losses and metrics over micro-batches and processes, with one device synchronisation."""
    total, *sums = Readout(_numbers(run, losses)).read()
    return total, {name: (sums[2 * index], sums[2 * index + 1]) for index, name in enumerate(run.method.metrics)}


def _check(run: TrainState, metrics: StepMetrics, batches: list[Batch]) -> None:
    def again(batch: Batch) -> torch.Tensor:
        with forward_pass(run):
            return run.method.loss(*_asked(run, run.model, batch, run.reference)).total

    # The scaler handles an overflow of scaled gradients: it skips the update and lowers the scale.
    norm = 0.0 if run.scaler.is_enabled() else metrics.grad_norm
    check_finite(run, metrics.loss, norm, batches, again, lambda part: run.feed.where(batches[part]))


def _update(run: TrainState, *, last: bool) -> None:
    """Update weights and schedule; a late update leaves weights and moments alone where ``run.broken`` is true.

    Raises:
        UpdateOutOfMemory: memory ran out.
    """
    try:
        if run.scaler.is_enabled():
            run.scaler.step(run.optimizer)
            run.scaler.update()
        elif run.late:
            with skipping(run.optimizer, run.broken):
                run.optimizer.step()
        else:
            run.optimizer.step()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise UpdateOutOfMemory(first_line(error)) from error
    if last:
        run.schedule.step()
    run.optimizer.zero_grad(set_to_none=True)
