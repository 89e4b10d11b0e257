"""What is done where a step fails: memory runs out, or loss or gradient are not finite."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch

from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.data.batch import Batch
from halftune.plan import BatchPlan
from halftune.train.callbacks.base import StepMetrics
from halftune.train.callbacks.nonfinite import NonFiniteStep, intact
from halftune.train.memory import peak_memory_bytes
from halftune.train.processes import sum_over_processes
from halftune.train.random_state import restore_random_state
from halftune.train.state import TrainState

log = get_logger(__name__)

# Beside torch's own exception for accelerators: its allocator on a CPU, and the libraries under it.
_PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


def smaller(batch: BatchPlan) -> BatchPlan | None:
    """The same global batch in micro-batches of half the rows, or fewer where that does not divide it; None for one."""
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


def start_over(run: TrainState, randoms: dict[str, Any]) -> None:
    """As if the step had not been tried: no gradients, no half-used memory, the same dropout.

    Called where the error is not held any more, and with it the tensors of the step.
    """
    run.optimizer.zero_grad(set_to_none=True)
    free_memory(run.device)
    restore_random_state(randoms, run.device)


def free_memory(device: torch.device) -> None:
    """Gives back what nobody holds any more."""
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
    """How many rows ran out of memory; one is as few as there are, and no smaller batch would help."""
    return f"one row {of}, the fewest there can be" if batch.micro_batch == 1 else f"{batch.micro_batch} rows {of}"


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that some append."""
    said = str(error).strip().splitlines()
    return said[0] if said else type(error).__name__
