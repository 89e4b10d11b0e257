"""One optimizer step (loss of the global batch, gradient, clipping, update), and the loss of the evaluation set.

Where memory runs out, the step is repeated with smaller micro-batches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.data.batch import Batch
from halftune.methods import AdapterOff, Loss, Reference
from halftune.model.policy import PolicyModel
from halftune.plan import BatchPlan
from halftune.precision.dtypes import autocast
from halftune.train.callbacks.base import EVAL_SET, Averages, StepMetrics
from halftune.train.callbacks.nonfinite import NonFiniteStep, check_finite, intact
from halftune.train.feed import Feed
from halftune.train.numeric_environment import restore_random_state
from halftune.train.parallel.watchdog import tick
from halftune.train.processes import peak_memory_bytes, sum_over_processes
from halftune.train.quantities import ratios
from halftune.train.state import TrainState


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
    try:
        for name, batches in ((name, batches) for name, one in feed.sets.items() for batches in one.once()):
            left = should_stop()
            if together:
                left = sum_over_processes(run.accelerator, [float(left)])[0] > 0
            if left:
                break
            for batch in batches if run.rollouts is None else run.rollouts(batches, feed):
                if batch.weight or together:
                    with forward_pass(run):
                        losses[name].append(_loss(run, _policy(run, run.model), batch, run.eval_reference))
                    weights[name] += batch.weight
    finally:
        run.model.train(training)
        run.strategy.after_evaluation(run.model)
    *sums, leaving = sum_over_processes(run.accelerator, [*weights.values(), float(left)])
    found = [sum_losses(run, losses[name]) for name in losses]
    return None if leaving else _eval_metrics(dict(zip(weights, sums, strict=True)), found)


def _eval_metrics(weights: dict[str, float], found: Sequence[tuple[float, Averages]]) -> dict[str, float]:
    """Metrics from the weights of the evaluation sets, and their sums of losses and averages in the same order."""
    totals = [total for total, _ in found]
    metrics = {"eval_loss": sum(totals) / (sum(weights.values()) or 1.0)}
    for (name, weight), total in zip(weights.items(), totals, strict=True):
        if name:
            metrics[f"{EVAL_SET}{name}"] = total / (weight or 1.0)
    return metrics | {f"eval_{name}": value for name, value in ratios([one for _, one in found]).items()}


log = get_logger(__name__)

# Beside torch's own exception for accelerators: its allocator on a CPU, and the libraries under it.
_PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


def smaller(batch: BatchPlan) -> BatchPlan | None:
    """Split the same global batch into micro-batches of at most half the rows; None if a micro-batch has one row."""
    rows = batch.micro_batch * batch.accumulation
    fitting = [size for size in range(1, batch.micro_batch // 2 + 1) if rows % size == 0]
    return replace(batch, micro_batch=fitting[-1], accumulation=rows // fitting[-1]) if fitting else None


def may_split(run: TrainState) -> bool:
    """Whether the next step may be taken again in smaller micro-batches where memory runs out."""
    if run.processes > 1:  # one of several cannot start a step over: the others wait in the middle of it
        return False
    rule = run.config.training.on_out_of_memory
    return rule == "always" or (rule == "first_step" and run.taken == 0)


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
    if halved is None or not may_split(run):
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


def reset_step(run: TrainState, randoms: dict[str, Any]) -> None:
    """Undo a step that ran out of memory: clear gradients, free memory, restore the random state.

    Call it outside the ``except`` block: the error keeps the tensors of the step alive.
    """
    run.optimizer.zero_grad(set_to_none=True)
    free_memory(run.device)
    restore_random_state(randoms, run.device)


def free_memory(device: torch.device) -> None:
    """Free unreferenced tensors and the cache of the device."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


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


def memory_error(run: TrainState, error: BaseException, *, updating: bool = False) -> TrainingError:
    """What is said where memory ran out in a step that is not tried again; ``updating``: in the optimizer's update."""
    batch, ways = run.feed.batch, remedies(run)
    if not updating and (halved := smaller(batch)) is not None:
        split = f"per_device_train_batch_size: {halved.micro_batch} with "
        split += f"gradient_accumulation_steps: {halved.accumulation} (the same global batch), or "
        ways = split + ways
    where = "in the optimizer's update" if updating else f"with {rows_of(batch, 'a forward pass')}"
    return TrainingError(
        f"out of memory in step {run.step + 1} {where}: {first_line(error)}",
        remedy=f"{ways}; {intact(run.folder)}",
        code="train.out_of_memory",
    )


def remedies(run: TrainState) -> str:
    """The settings that would still save memory, by how this run is set."""
    left = [f"a shorter data.max_length (now {run.config.data.max_length:,})"]
    if not run.plan.batch.gradient_checkpointing.value:
        left.insert(0, "training.gradient_checkpointing: true")
    if run.config.adapter.type == "none":
        left.append("adapter: lora")
    if run.plan.precision.compute.value == "fp32":
        left.append("precision: bf16")
    return f"{', '.join(left)} or a smaller model (`halftune plan` says what takes the memory)"


def rows_of(batch: BatchPlan, of: str) -> str:
    """Describe the rows of a micro-batch that ran out of memory."""
    return f"one row {of}, the minimum" if batch.micro_batch == 1 else f"{batch.micro_batch} rows {of}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    said = str(error).strip().splitlines()
    return said[0] if said else type(error).__name__


def train_step(run: TrainState, batches: list[Batch], *, answered: bool = False, last: bool = True) -> StepMetrics:
    """Train on one global batch.

    Loss = sum of the examples' losses / sum of their weights, over all micro-batches and processes. The split into
    micro-batches changes only the rounding.

    Args:
        run: the run; weights, optimizer, schedule and scaler are updated.
        batches: micro-batches of this process; they get the columns that the loss adds.
        answered: the model has answered the prompts.
        last: the schedule is updated, too.

    Raises:
        NonFiniteStep: loss or gradient are not finite; the weights are as they were.
        TrainingError: memory ran out while the weights were updated.
    """
    if run.rollouts is not None and not answered:
        return _step_on_answers(run, run.rollouts(batches, run.feed), run.rollouts.iterations)
    counts = [[batch.fed, batch.real, batch.trained, batch.weight] for batch in batches]
    *tokens, weight = sum_over_processes(run.accelerator, [sum(column) for column in zip(*counts, strict=True)])
    # Gradients are averaged over processes; the loss wants their sum.
    scale = run.processes / (weight or 1.0)
    losses = []
    for index, batch in enumerate(batches):
        with run.strategy.accumulating(run.wrapped, last=index == len(batches) - 1):
            with forward_pass(run):
                loss = _loss(run, _policy(run, run.wrapped, scale), batch, run.reference)
            run.scaler.scale(loss.total * scale).backward()
        losses.append(Loss(loss.total.detach(), loss.metrics))
        if loss.columns:
            batches[index] = replace(batch, columns={**batch.columns, **loss.columns})
    total, averages = sum_losses(run, losses)
    run.scaler.unscale_(run.optimizer)
    norm = run.strategy.gradient_norm(run.trainable, run.config.training.max_grad_norm)
    extra = {"skipped": 0.0} if run.config.training.on_non_finite == "skip" else {}
    fed, real, trained = map(int, tokens)
    metrics = StepMetrics(
        total / (weight or 1.0), run.rate, norm, fed, real, trained, 0.0, 0, extra, weight=weight, averages=averages
    )
    _check(run, metrics, batches)
    try:
        _update(run, metrics, last=last)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise memory_error(run, error, updating=True) from error
    metrics.memory_bytes = peak_memory_bytes(run.device)
    return metrics


def _step_on_answers(run: TrainState, answers: list[Batch], updates: int) -> StepMetrics:
    """Several updates on the same answers, as one step."""
    found = [train_step(run, answers, answered=True, last=updates == 1)]
    for left in reversed(range(updates - 1)):
        try:
            found.append(train_step(run, answers, answered=True, last=not left))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise memory_error(run, error) from error  # the step has changed the weights, and cannot be repeated
    averages = {}
    for name in found[0].averages:
        sums, counts = zip(*(one.averages[name] for one in found), strict=True)
        averages[name] = (sum(sums), sum(counts))
    return replace(
        found[-1],
        loss=sum(one.loss for one in found) / updates,
        grad_norm=sum(one.grad_norm for one in found) / updates,
        tokens=sum(one.tokens for one in found),
        tokens_real=sum(one.tokens_real for one in found),
        tokens_trained=sum(one.tokens_trained for one in found),
        averages=averages,
    )


def _policy(run: TrainState, model: torch.nn.Module, scale: float = 1.0) -> PolicyModel:
    training = run.config.training
    return PolicyModel(model, scale, training.label_smoothing, training.router_aux_loss_coef)


def _loss(run: TrainState, policy: PolicyModel, batch: Batch, reference: Reference | None) -> Loss:
    return run.method.loss(policy, batch.to(run.device), reference or AdapterOff(policy))


@contextmanager
def forward_pass(run: TrainState) -> Iterator[None]:
    """Run the forward pass of a micro-batch under the plan's autocast, with a heartbeat before and after."""
    tick()
    with autocast(run.plan.precision, run.device):
        yield
    tick()  # a rank in the backward pass is ahead of one that hangs in the forward pass


def sum_losses(run: TrainState, losses: Sequence[Loss]) -> tuple[float, Averages]:
    """Sum losses and metrics over micro-batches and processes, with one device synchronisation."""
    names = run.method.metrics
    rows = [torch.stack([one.total, *(x for name in names for x in one.metrics[name])]) for one in losses]
    local = torch.stack(rows).cpu().double().sum(0).tolist() if rows else [0.0] * (1 + 2 * len(names))
    total, *sums = sum_over_processes(run.accelerator, local)
    return total, {name: (sums[2 * index], sums[2 * index + 1]) for index, name in enumerate(names)}


def _check(run: TrainState, metrics: StepMetrics, batches: list[Batch]) -> None:
    def again(batch: Batch) -> torch.Tensor:
        with forward_pass(run):
            return _loss(run, _policy(run, run.model), batch, run.reference).total

    # The scaler handles an overflow of scaled gradients: it skips the update and lowers the scale.
    norm = 0.0 if run.scaler.is_enabled() else metrics.grad_norm
    check_finite(run, metrics.loss, norm, batches, again, lambda part: run.feed.where(batches[part]))


def _update(run: TrainState, metrics: StepMetrics, *, last: bool) -> None:
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
    if updated and last:
        run.schedule.step()
    run.optimizer.zero_grad(set_to_none=True)
