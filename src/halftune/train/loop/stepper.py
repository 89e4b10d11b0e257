"""Takes a run's steps: one after the other, or each while the numbers of the one before are still on their way.

Late, a step that is not finite is left out by the device, and so is the one started after it. Once the host has read
that, it takes the second one again: weights, moments, learning rates and random numbers are as if it had known at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from halftune.data.batch import Batch
from halftune.optim.device_side import can_skip
from halftune.train.callback import StepMetrics
from halftune.train.loop.nonfinite import NonFiniteStep
from halftune.train.loop.out_of_memory import may_split, reset_step, unrepeatable
from halftune.train.loop.recovery import recover
from halftune.train.loop.step import StartedStep, finish_step, start_step
from halftune.train.numeric_environment import random_state, restore_random_state
from halftune.train.state import TrainState


@dataclass
class _Waiting:
    """A step that is not read yet, and the state of the run before it."""

    epoch: float
    batches: list[Batch]
    schedule: dict[str, Any]
    rates: list[float]
    started: StartedStep


class Stepper:
    """The steps of a run.

    Args:
        run: the run.
        stepped: called with the epoch reached and the metrics of each step that has been read.
        interrupted: whether this process has received a signal.

    Attributes:
        stopping: whether any process had, as of the last step read.
    """

    def __init__(
        self, run: TrainState, stepped: Callable[[float, StepMetrics], None], interrupted: Callable[[], bool]
    ) -> None:
        self.run, self.stepped, self.interrupted, self.stopping = run, stepped, interrupted, False
        self._waiting: _Waiting | None = None

    @property
    def waiting(self) -> bool:
        """Whether a step has been started that is not read."""
        return self._waiting is not None

    @property
    def started(self) -> tuple[int, float]:
        """Number and epoch of the last step that was started."""
        if self._waiting is None:
            return self.run.step, self.run.epoch
        return self.run.step + 1, self._waiting.epoch

    def take(self, epoch: float, batches: list[Batch]) -> bool:
        """Take a step, or start it and read the one before; where that is skipped, start this one again.

        Returns:
            False where memory ran out: the same step must be taken again, from what is now ``run.feed``.

        Raises:
            TrainingError: see ``train.loop.recovery``.
        """
        run, skips = self.run, self.run.config.training.on_non_finite == "skip"
        randoms = random_state(run.device) if may_split(run) or (run.late and skips) else {}
        following, metrics = None, None
        try:
            if run.late:
                # state of the schedule, and learning rates
                state = dict(run.schedule.state_dict()), [group["lr"] for group in run.optimizer.param_groups]
                following = _Waiting(epoch, batches, *state, start_step(run, batches, stop=self.interrupted()))
            else:
                metrics = _updates(run, batches if run.rollouts is None else run.rollouts(batches, run.feed))
        except (NonFiniteStep, RuntimeError, MemoryError) as error:
            self.finish()  # the step before is not to blame
            metrics = recover(run, error, batches)
        if metrics is not None:
            self.stepped(epoch, metrics)
        elif following is None:
            reset_step(run, randoms)
            return False
        elif self.finish(following):
            restore_random_state(randoms, run.device)
            return self.take(epoch, batches)
        return True

    def finish(self, following: _Waiting | None = None) -> bool:
        """Read the step that waits, if any; ``following`` waits then.

        Returns:
            True where the device has left ``following`` out, too: it must be started again.

        Raises:
            NonFiniteStep: it was not finite, and ``training.on_non_finite`` says stop; the weights are those before it.
        """
        run, before, repeat = self.run, self._waiting, False
        self._waiting = following
        if before is None:
            return False
        try:
            metrics = finish_step(run, before.started)
        except NonFiniteStep as error:
            run.broken, repeat = False, following is not None
            run.schedule.load_state_dict(before.schedule)
            for group, rate in zip(run.optimizer.param_groups, before.rates, strict=True):
                group["lr"] = rate
            metrics = recover(run, error, before.batches)
            assert metrics is not None, "memory runs out when a step is started"
        self.stopping = before.started.stopping
        self.stepped(before.epoch, metrics)
        if repeat:
            self._waiting = None
        return repeat


def _updates(run: TrainState, batches: list[Batch]) -> StepMetrics:
    """The updates of one step: as many on the same batches as the method asks for.

    Raises:
        NonFiniteStep, TrainingError: as ``finish_step``.
    """
    found: list[StepMetrics] = []
    for left in reversed(range(run.method.updates)):
        with unrepeatable(run, changed=bool(found)):
            started = start_step(run, batches, last=not left)
            found.append(finish_step(run, started))
        batches = started.batches  # with the log-probabilities by the weights that sampled: the first update found them
    return _as_one(found)


def _as_one(steps: list[StepMetrics]) -> StepMetrics:
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


def runs_late(run: TrainState) -> bool:
    """Whether a step's numbers are read while the next step runs: on GPUs, where the optimizer can leave a step out.

    Not where the host acts within a step: a loss scaler, answers to prompts, an update in main memory.
    """
    offload = run.plan.parallel is not None and run.plan.parallel.offload
    waits = run.scaler.is_enabled() or run.config.method.samples_answers or offload
    return run.device.type in ("cuda", "xpu") and can_skip(run.optimizer) and not waits
