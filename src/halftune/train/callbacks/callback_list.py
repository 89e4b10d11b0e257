"""All callbacks of a run: told of everything in order; one that only looks on and fails does not end the training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halftune.core import alive
from halftune.core.errors import HalftuneError
from halftune.core.log import get_logger
from halftune.train.callbacks.base import Callback
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
            alive.sign()
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
            alive.sign()
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
