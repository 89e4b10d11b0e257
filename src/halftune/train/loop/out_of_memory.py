"""Out of memory: how it is recognised, the next smaller batch, what is said.

Caught in ``train.loop.stepper``; ``train.loop.recovery`` decides what follows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from halftune.core.errors import TrainingError
from halftune.plan import BatchPlan
from halftune.train.numeric_environment import restore_random_state
from halftune.train.run_folder.checkpoints import intact
from halftune.train.state import TrainState

# Beside torch's own exception for accelerators: its allocator on a CPU, and the libraries under it.
_PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


class UpdateOutOfMemory(MemoryError):
    """Memory ran out in the optimizer's update: the step cannot be repeated."""


@contextmanager
def named_update() -> Iterator[None]:
    """Inside ``with``, running out of memory is an ``UpdateOutOfMemory``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise UpdateOutOfMemory(first_line(error)) from error


@contextmanager
def unrepeatable(run: TrainState, *, changed: bool) -> Iterator[None]:
    """Inside ``with``, running out of memory ends the run if its step has ``changed`` the weights already.

    Raises:
        TrainingError: says what would save memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not changed or not out_of_memory(error):
            raise
        raise memory_error(run, error) from error


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


def memory_error(run: TrainState, error: BaseException) -> TrainingError:
    """What is said where memory ran out in a step that is not tried again."""
    batch, ways, updating = run.feed.batch, remedies(run), isinstance(error, UpdateOutOfMemory)
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
