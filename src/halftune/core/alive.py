"""Signs of life of this process: whoever does something long says that it goes on. Every package may."""

from __future__ import annotations

import time

SLOWEST = 20_000_000  # bytes per second of a disk that is slow but works

signs = 0  # how many this process has given
extra = 0.0  # seconds that the present piece of work may take beyond the limit
longest = 0.0  # seconds between two of them, since forget()
_last = 0.0  # time.monotonic() of the latest


def sign(size: int = 0) -> None:
    """Says that this process goes on; between two calls may lie no more than ``distributed.timeout_seconds``.

    Args:
        size: bytes that are read or written in one piece before the next call: the limit is longer by the time that
            the slowest disk takes for them.
    """
    global signs, extra
    wait()
    signs, extra = signs + 1, size / SLOWEST


def wait() -> None:
    """Says that this process is sound, but waits: no reason for others to wait for it."""
    global longest, _last
    now = time.monotonic()
    if signs:
        longest = max(longest, now - _last)
    _last = now


def silent() -> float:
    """Seconds since the latest call, less what it allowed for."""
    return max(0.0, time.monotonic() - _last - extra)


def forget() -> None:
    """Measures ``longest`` anew: what was done so far (loading a model) is no measure of what comes."""
    global longest
    longest = 0.0
