"""Signals that end a process by unwinding it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit: temporary folders are removed, and child processes ended.

    What ignores these signals, or handles them itself, stays as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
