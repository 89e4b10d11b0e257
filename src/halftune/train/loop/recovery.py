"""What becomes of a step that could not be taken: it is skipped, taken again in smaller parts, or ends the run."""

from __future__ import annotations

from dataclasses import replace

from halftune.core.log import get_logger
from halftune.data.batch import Batch
from halftune.train.callback import StepMetrics
from halftune.train.loop.nonfinite import NonFiniteStep
from halftune.train.loop.out_of_memory import UpdateOutOfMemory, may_split, memory_error, out_of_memory, smaller
from halftune.train.parallel.processes import peak_memory_bytes, sum_over_processes
from halftune.train.state import TrainState

log = get_logger(__name__)


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
