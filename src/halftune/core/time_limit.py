"""A limit on the CPU time of a piece of Python that may not end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(Exception):
    """The block took more CPU time than it may."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Ends the block after ``seconds`` of CPU time of this process. In other threads than the main one it has no limit.

    Raises:
        OutOfTime: the limit is reached.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _end(number: int, frame: FrameType | None) -> None:
    raise OutOfTime("out of CPU time")
