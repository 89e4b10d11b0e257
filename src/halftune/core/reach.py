"""Waiting for another machine in words: what is waited for every few seconds, and at last why nothing came."""

from __future__ import annotations

import errno
import socket
import sys
import time
from collections.abc import Callable

EVERY = 10.0  # seconds between two lines that say what is waited for
POLL = 0.2  # seconds
_TRY = 5.0  # seconds that one attempt to connect may take


class Patience:
    """A time limit that says every :data:`EVERY` seconds what is waited for.

    Args:
        seconds: the limit.
        say: prints a line.
    """

    def __init__(self, seconds: float, say: Callable[[str], None] | None = None) -> None:
        self.seconds, self.began = seconds, time.monotonic()
        self._said, self._print = self.began, say or _to_stderr

    def left(self) -> float:
        """Seconds until the limit; negative after it."""
        return self.began + self.seconds - time.monotonic()

    def wait(self, what: str) -> None:
        """Waits a moment; prints what is waited for, unless that was only just said."""
        now = time.monotonic()
        if now - self._said >= EVERY:
            self._said = now
            self._print(f"waiting for {what} ({now - self.began:.0f} of {self.seconds:.0f} s)")
        time.sleep(max(min(POLL, self.left()), 0.0))


def reach(host: str, port: int, patience: Patience, whom: str) -> str:
    """Waits until something listens at an address.

    Args:
        host, port: where.
        patience: how long.
        whom: who should be there, for the lines that say what is waited for.

    Returns:
        nothing, or what the network answered last where nothing did listen within the limit.
    """
    while True:
        try:
            socket.create_connection((host, port), timeout=max(min(_TRY, patience.left()), POLL)).close()
            return ""
        except OSError as error:
            why = _reason(error)
        if patience.left() <= 0:
            return why
        patience.wait(f"{whom} at {place(host, port)}: {why}")


def place(host: str, port: int) -> str:
    """An address as it is written in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, so nothing listens there (yet), or a firewall says no"
    if isinstance(error, TimeoutError):
        return "no answer (timed out), so the address is wrong or a firewall drops what is sent there"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"{error.strerror}, so no such machine is in a network that this one reaches"
    return error.strerror or str(error)


def _to_stderr(line: str) -> None:
    print(f"halftune: {line}", file=sys.stderr, flush=True)
