"""Ends waiting that has no end: torch asks the store on machine 0 without a limit, also over a network that was cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_POLL = 0.5  # seconds


class Deadline:
    """A thread that calls somebody when a time is over that nobody has extended.

    Args:
        seconds: until then.
        over: called then; whoever it calls extends the time, or ends the process.
    """

    def __init__(self, seconds: float, over: Callable[[], None]) -> None:
        self._over, self._until = over, 0.0
        self.extend(seconds)
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def extend(self, seconds: float) -> None:
        """So many seconds from now on."""
        self._until = time.monotonic() + seconds

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL)
            if time.monotonic() > self._until:
                self._over()
