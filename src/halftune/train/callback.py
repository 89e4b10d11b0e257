"""What a callback sees, when it is called, and the list of a run's callbacks.

Everything periodic in a run is a callback; the loop only steps. A callback that fails and only observes does not end
the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from halftune.core.errors import HalftuneError
from halftune.core.log import get_logger
from halftune.core.processes import heartbeat
from halftune.train.state import TrainState

log = get_logger(__name__)

# What disks, libraries and odd numbers raise. Broken promises of our own code (assert, NameError) are not among them.
FAILURES = (OSError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, ImportError)


class CallbackList:
    """The callbacks of a run.

    Attributes:
        failures: class name of a callback that failed → (how often, the first error in words).
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)
        self.failures: dict[str, tuple[int, str]] = {}
        self._absent: set[int] = set()

    def tell(self, event: str, run: TrainState, *details: Any) -> None:
        """Calls ``event`` of every callback.

        A watching callback that fails is warned of once and called again the next time; one that failed at the start
        is not called again before the end.

        Raises:
            HalftuneError: a callback ends the run, or cannot do what was asked for.
        """
        for callback in self.callbacks:
            if id(callback) in self._absent:
                continue
            heartbeat.beat()
            try:
                getattr(callback, event)(run, *details)
            except FAILURES as error:
                if not callback.watches or (callback.together and run.sharded):
                    raise
                self._note(callback, error)
                if event == "on_start":
                    self._absent.add(id(callback))

    def end(self, run: TrainState, error: BaseException | None) -> None:
        """Tells everyone of the end, and sums up what failed. What ended the run is never hidden by another error."""
        for callback in self.callbacks:
            heartbeat.beat()
            try:
                callback.on_end(run, error)
            except (HalftuneError, *FAILURES) as failure:
                self._note(callback, failure)
        if self.failures:
            parts = [f"{name} {_times(count)} ({what})" for name, (count, what) in self.failures.items()]
            log.warning("callbacks that failed during training: %s", "; ".join(parts))

    def states(self) -> dict[str, dict[str, Any]]:
        """Class name → state, of those that have one."""
        return {type(callback).__name__: state for callback in self.callbacks if (state := callback.state())}

    def restore(self, states: dict[str, dict[str, Any]]) -> None:
        """Gives the states back."""
        for callback in self.callbacks:
            if type(callback).__name__ in states:
                callback.restore(states[type(callback).__name__])

    def _note(self, callback: Callback, error: Exception) -> None:
        name = type(callback).__name__
        count, first = self.failures.get(name, (0, f"{type(error).__name__}: {error}"))
        self.failures[name] = (count + 1, first)
        if not count:
            log.warning("%s failed, training continues: %s", name, first)
        log.debug("%s failed", name, exc_info=error)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


EVAL_SET = "eval_loss_"  # and the name of an evaluation set: the metric of its loss
Averages = dict[str, tuple[float, float]]  # name → (sum, count)
Phase = Literal["tokenising", "compiling", "loading", "training", "evaluating", "saving", "finished"]


@dataclass
class StepMetrics:
    """What one optimizer step measured, over all processes.

    Attributes:
        loss: of the global batch: the method's sum over its examples, divided by ``weight``.
        learning_rate: of the first parameter group, as used in this step.
        grad_norm: global gradient norm before clipping.
        tokens: fed tokens, padding included.
        tokens_real: without padding.
        tokens_trained: that carry a label.
        seconds: wall time of the step, the making of its batches included.
        memory_bytes: peak device memory so far; resident memory of the process on a CPU.
        extra: further numbers to log, e.g. the loss scale.
        weight: what the loss was divided by: trained tokens, or what the method counts.
        averages: the method's own metrics, each a sum and what it is divided by.
    """

    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_real: int
    tokens_trained: int
    seconds: float
    memory_bytes: int
    extra: dict[str, float] = field(default_factory=dict)
    weight: float = field(default=0.0, kw_only=True)
    averages: Averages = field(default_factory=dict, kw_only=True)


class Callback:
    """Does nothing at every point; a callback overrides what it needs. Called on every process.

    Attributes:
        watches: it only observes (writes, draws, reports); training continues if it fails.
        together: it computes with the model. Where that is sharded, a process on which it fails has left the others in
            the middle of a forward pass, and training cannot go on.
    """

    watches: ClassVar[bool] = False
    together: ClassVar[bool] = False

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of it, JSON-able; asked of the main process."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes back what :meth:`state` gave, before ``on_start``; not called where the checkpoint knows none."""

    def on_start(self, run: TrainState) -> None:
        """Once, before the first step: the model is loaded, the plan is checked, a checkpoint has been restored."""

    def on_phase(self, run: TrainState, phase: Phase) -> None:
        """The run enters another phase."""

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """After every optimizer step."""

    def on_evaluate(self, run: TrainState, metrics: dict[str, float]) -> None:
        """After an evaluation; ``metrics`` has at least ``eval_loss``, and ``eval_loss_NAME`` of named sets."""

    def on_save(self, run: TrainState, folder: Path) -> None:
        """After a checkpoint is complete on disk; on the main process only."""

    def on_end(self, run: TrainState, error: BaseException | None) -> None:
        """Once, at the end; ``error`` is what ended the run early, or None. Must not raise."""


class Counter(Callback):
    """Counts what ends a run that has enough of it; equal on every process, as the losses are.

    Attributes:
        since: the count, which checkpoints hold.
    """

    since = 0

    def state(self) -> dict[str, Any]:
        """The count."""
        return {"since": self.since}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on counting."""
        self.since = state["since"]

    def on_start(self, run: TrainState) -> None:
        """A run that had stopped stays stopped, unless more is allowed now."""
        self.look(run)

    def look(self, run: TrainState) -> None:
        """Sets ``run.stop`` where the count is too high."""
        raise NotImplementedError
