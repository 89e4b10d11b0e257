"""Heartbeats of this process, sent by long operations in any package."""

from __future__ import annotations

import time

SLOWEST = 20_000_000  # bytes per second of a disk that is slow but works

beats = 0  # heartbeats of this process so far
ticks = 0  # units of progress of this process in a run of several
extension = 0.0  # seconds by which the current operation extends the limit
longest = 0.0  # longest interval in seconds since forget()
_last = 0.0  # time.monotonic() of the last heartbeat


def beat(size: int = 0) -> None:
    """Send a heartbeat: this process makes progress. Required every ``distributed.timeout_seconds``.

    Args:
        size: bytes of the next read or write, which extends the limit by the time a slow disk takes for them.
    """
    global beats, extension
    wait()
    beats, extension = beats + 1, size / SLOWEST


def tick() -> None:
    """Count one unit of progress and send a heartbeat.

    All ranks call this equally often. The rank with the fewest ticks is behind.
    """
    global ticks
    ticks += 1
    beat()


def wait() -> None:
    """Send a heartbeat while waiting: the process is healthy, without progress."""
    global longest, _last
    now = time.monotonic()
    if beats:
        longest = max(longest, now - _last)
    _last = now


def silent() -> float:
    """Return the seconds since the last heartbeat, minus its extension."""
    return max(0.0, time.monotonic() - _last - extension)


def forget() -> None:
    """Reset ``longest``, for example after loading the model."""
    global longest
    longest = 0.0
