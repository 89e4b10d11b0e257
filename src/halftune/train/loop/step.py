"""One optimizer step: the gradient of the global batch's loss, clipping, the update of the weights.

A step measures everything in one vector on the device, which is read once. Where the run is late, that is done while
the next step runs, and the device itself leaves a step out that is not finite; see ``train.loop.stepper``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from halftune.core.processes import heartbeat
from halftune.data.batch import Batch
from halftune.methods import AdapterOff, Loss, Reference
from halftune.model.policy.policy import PolicyModel
from halftune.optim.device_side import loss_scaling, scale_after, skipping
from halftune.precision.dtypes import autocast
from halftune.train.callback import Averages, StepMetrics
from halftune.train.loop.nonfinite import check_finite
from halftune.train.loop.out_of_memory import named_update
from halftune.train.parallel.processes import Readout, peak_memory_bytes, sum_over_processes, sum_tensor, wide
from halftune.train.state import TrainState

# Factor of a loss whose weight over all processes is not known yet: a power of two, so that it rounds nothing.
_UNSCALED = 2.0**-10


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
                loss = run.method.loss(*asked(run, run.wrapped, batch, run.reference, scale))
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
    metrics, scaling = _read(run, started)
    _check(run, metrics, started.batches)
    updated = True
    if scaling:
        updated, after = scale_after(run.scaler, *scaling)
        metrics.extra |= {"loss_scale": after, "skipped": float(not updated)}
    if not run.late:
        _update(run, last=started.last and updated)
    metrics.memory_bytes = peak_memory_bytes(run.device)
    return metrics


def _read(run: TrainState, started: StartedStep) -> tuple[StepMetrics, list[float]]:
    """The metrics of a step, and what its loss scaler measured, if it has one."""
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
    return metrics, scaling


def asked(
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
            return run.method.loss(*asked(run, run.model, batch, run.reference)).total

    # The scaler handles an overflow of scaled gradients: it skips the update and lowers the scale.
    norm = 0.0 if run.scaler.is_enabled() else metrics.grad_norm
    check_finite(run, metrics.loss, norm, batches, again, lambda part: run.feed.where(batches[part]))


def _update(run: TrainState, *, last: bool) -> None:
    """Update weights and schedule; a late update leaves weights and moments alone where ``run.broken`` is true.

    Raises:
        UpdateOutOfMemory: memory ran out.
    """
    with named_update():
        if run.scaler.is_enabled():
            run.scaler.step(run.optimizer)
            run.scaler.update()
        elif run.late:
            with skipping(run.optimizer, run.broken):
                run.optimizer.step()
        else:
            run.optimizer.step()
    if last:
        run.schedule.step()
    run.optimizer.zero_grad(set_to_none=True)
