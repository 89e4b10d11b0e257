"""A watchdog for torch's calls to the store on machine 0, which have no timeout if the network is cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_POLL = 0.5  # seconds


class Deadline:
    """A thread that calls ``over`` if a deadline passes without being extended.

    Args:
        seconds: until the deadline.
        over: must extend the deadline or end the process.
    """

    def __init__(self, seconds: float, over: Callable[[], None]) -> None:
        self._over, self._until = over, 0.0
        self.extend(seconds)
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def extend(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now."""
        self._until = time.monotonic() + seconds

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL)
            if time.monotonic() > self._until:
                self._over()
