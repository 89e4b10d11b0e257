"""Takes optimizer steps, and deals with what may go wrong in one: memory that runs out, numbers that are not finite."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.plan import BatchPlan
from halftune.train.callbacks.base import Run, StepMetrics
from halftune.train.callbacks.nonfinite import NonFiniteStep, check_finite, intact
from halftune.train.feed import MicroBatch
from halftune.train.memory import peak_memory_bytes
from halftune.train.processes import sum_over_processes
from halftune.train.random_state import random_state, restore_random_state
from halftune.train.setup import Session
from halftune.train.step import Stepper
from halftune.train.validation import evaluate

log = get_logger(__name__)

# Beside torch's own exception for accelerators: its allocator on a CPU, and the libraries under it.
_PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


def remedies(run: Run) -> str:
    """The settings that would still save memory, by how this run is set."""
    left = [f"a shorter data.max_length (now {run.config.data.max_length:,})"]
    if not run.plan.batch.gradient_checkpointing.value:
        left.insert(0, "training.gradient_checkpointing: true")
    if run.config.adapter.type == "none":
        left.append("adapter: lora")
    if run.plan.precision.compute.value == "fp32":
        left.append("precision: bf16")
    return f"{', '.join(left)} or a smaller model (`halftune plan` says what takes the memory)"


def smaller(batch: BatchPlan) -> BatchPlan | None:
    """The same global batch in micro-batches of half the rows, or fewer where that does not divide it; None for one."""
    rows = batch.micro_batch * batch.accumulation
    fitting = [size for size in range(1, batch.micro_batch // 2 + 1) if rows % size == 0]
    return replace(batch, micro_batch=fitting[-1], accumulation=rows // fitting[-1]) if fitting else None


class Attempts:
    """The steps of a sitting.

    Attributes:
        stepper: takes them.
        done: how many it has taken.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.run, self.done = session, session.run, 0
        self.training = session.run.config.training
        trained = session.trained
        self.stepper = Stepper(
            session.accelerator,
            session.strategy,
            session.wrapped,
            trained.optimizer,
            trained.schedule,
            trained.scaler,
            session.run.plan,
            self.training.max_grad_norm,
            self._check,
        )
        self._updating = False

    def take(self, batches: list[MicroBatch]) -> StepMetrics | None:
        """One optimizer step; None where memory ran out and ``session.feed`` now makes smaller micro-batches of it.

        Raises:
            TrainingError: memory ran out and the batch may or can not be split; loss or gradient are not finite.
        """
        retry = self._may_split()
        randoms = random_state(self.run.device) if retry else {}
        self._updating = False
        try:
            metrics = self.stepper.step(batches)
        except NonFiniteStep as error:
            if self.training.on_non_finite == "stop":
                raise
            metrics = self._skip(error, batches)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            halved = smaller(self.session.feed.batch) if retry and not self._updating else None
            if halved is None:
                raise self._too_little(error) from error
            self._split(halved)
            metrics = None
        if metrics is None:
            self._start_over(randoms)  # out here: the caught error held the tensors of the attempt
            return None
        if self.training.on_non_finite == "skip":
            metrics.extra.setdefault("skipped", 0.0)
        self.done += 1
        return metrics

    def evaluate(self, abandoned: Callable[[], bool]) -> float | None:
        """The evaluation loss, in smaller batches where memory runs out; None where it was abandoned.

        Raises:
            TrainingError: memory runs out with one row.
        """
        while True:
            feed = self.session.eval_feed
            assert feed is not None
            try:
                return evaluate(self.stepper, self.run.model, feed, abandoned)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                halved = smaller(feed.batch)
                # the others wait in the middle of this forward pass where each has a share of the weights
                if halved is None or self.training.on_out_of_memory == "stop" or self.session.strategy.sharded:
                    rows = _rows(feed.batch, "at a time")
                    less = "" if halved is None else "a smaller training.per_device_eval_batch_size, "
                    raise TrainingError(
                        f"out of memory in the evaluation, {rows}: {first_line(error)}",
                        remedy=f"{less}{remedies(self.run)}; {intact(self.run.folder)}",
                    ) from error
            log.warning("out of memory in the evaluation: from now on %d rows at a time", halved.micro_batch)
            self.session.eval_feed = replace(feed, batch=halved)
            self._free()

    def _may_split(self) -> bool:
        # One process of several cannot start a step over: the others wait in the middle of it.
        if self.session.accelerator.num_processes > 1:
            return False
        rule = self.training.on_out_of_memory
        return rule == "always" or (rule == "first_step" and self.done == 0)

    def _check(self, loss: float, norm: float, batches: list[MicroBatch]) -> None:
        feed = self.session.feed
        check_finite(self.run, loss, norm, [batch.inputs for batch in batches], lambda part: feed.where(batches[part]))
        self._updating = True

    def _skip(self, error: NonFiniteStep, batches: list[MicroBatch]) -> StepMetrics:
        log.warning("%s: the update is skipped (training.on_non_finite: skip)", error.what)
        trained = self.session.trained
        if trained.scaler.is_enabled():
            trained.scaler.update()  # it has unscaled, and will not do that twice
        trained.optimizer.zero_grad(set_to_none=True)
        counts = [[batch.tokens, batch.tokens_real] for batch in batches]
        fed, real = sum_over_processes(self.session.accelerator, [sum(column) for column in zip(*counts, strict=True)])
        memory = peak_memory_bytes(self.run.device)
        rate = float(trained.schedule.get_last_lr()[0])
        # no token was trained, so the loss, which may be no number, weighs nothing where losses are averaged
        return StepMetrics(error.loss, rate, error.grad_norm, int(fed), int(real), 0, 0.0, memory, {"skipped": 1.0})

    def _split(self, halved: BatchPlan) -> None:
        before = self.session.feed.batch
        log.warning(
            "out of memory in step %d with %d rows a forward pass: from now on %d, and %d passes a step instead of %d; "
            "the global batch and the loss stay the same",
            self.run.step + 1,
            before.micro_batch,
            halved.micro_batch,
            halved.accumulation,
            before.accumulation,
        )
        self.session.feed = replace(self.session.feed, batch=halved)

    def _start_over(self, randoms: dict[str, Any]) -> None:
        """As if the step had not been tried: no gradients, no half-used memory, the same dropout."""
        self.session.trained.optimizer.zero_grad(set_to_none=True)
        self._free()
        restore_random_state(randoms, self.run.device)

    def _free(self) -> None:
        gc.collect()
        if self.run.device.type != "cpu":
            torch.get_device_module(self.run.device).empty_cache()

    def _too_little(self, error: BaseException) -> TrainingError:
        batch, left = self.session.feed.batch, [remedies(self.run)]
        if not self._updating and (halved := smaller(batch)) is not None:
            split = f"per_device_train_batch_size: {halved.micro_batch} with "
            split += f"gradient_accumulation_steps: {halved.accumulation} (the same global batch)"
            left.insert(0, split)
        where = "in the optimizer's update" if self._updating else f"with {_rows(batch, 'a forward pass')}"
        return TrainingError(
            f"out of memory in step {self.run.step + 1} {where}: {first_line(error)}",
            remedy=f"{', or '.join(left)}; {intact(self.run.folder)}",
        )


def _rows(batch: BatchPlan, of: str) -> str:
    """How many rows ran out of memory; one is as few as there are, and no smaller batch would help."""
    return f"one row {of}, the fewest there can be" if batch.micro_batch == 1 else f"{batch.micro_batch} rows {of}"


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that some append."""
    lines: Sequence[str] = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
