"""How long tests wait for what must happen: one limit for all. No test asserts how long something took."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

LIMIT = 600.0  # seconds; what has not happened by then never will, however slow and busy the machine


def until(happened: Callable[[], object], what: str) -> None:
    """Wait until ``happened()`` is true; fail with ``what`` after :data:`LIMIT`."""
    end = time.monotonic() + LIMIT
    while not happened():
        if time.monotonic() > end:
            raise AssertionError(f"not within {LIMIT:.0f} s: {what}")
        time.sleep(0.01)


def exit_code(process: int) -> int:
    """Wait for a forked process: its exit code, or minus the signal that ended it. One that does not end is killed."""
    status = list[int]()

    def ended() -> bool:
        found, code = os.waitpid(process, os.WNOHANG)
        status.extend([code] if found else [])
        return bool(found)

    try:
        until(ended, f"the end of process {process}")
    except AssertionError:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        raise
    return os.waitstatus_to_exitcode(status[0])
