"""Waits for a port on another node, with progress messages and the reason for a timeout."""

from __future__ import annotations

import errno
import socket
import sys
import time
from collections.abc import Callable

EVERY = 10.0  # seconds between progress messages
POLL = 0.2  # seconds
_TRY = 5.0  # timeout of one connection attempt in seconds


class Patience:
    """A timeout that prints a progress message every :data:`EVERY` seconds.

    Args:
        seconds: the limit.
        say: prints a line.
    """

    def __init__(self, seconds: float, say: Callable[[str], None] | None = None) -> None:
        self.seconds, self.began = seconds, time.monotonic()
        self._said, self._print = self.began, say or _to_stderr

    def left(self) -> float:
        """Return the seconds until the timeout; negative after it."""
        return self.began + self.seconds - time.monotonic()

    def wait(self, what: str) -> None:
        """Sleep briefly; print a progress message if one is due."""
        now = time.monotonic()
        if now - self._said >= EVERY:
            self._said = now
            self._print(f"waiting for {what} ({now - self.began:.0f} of {self.seconds:.0f} s)")
        time.sleep(max(min(POLL, self.left()), 0.0))


def wait_for_port(host: str, port: int, patience: Patience, whom: str) -> str:
    """Wait until a port accepts connections.

    Args:
        host, port: the address.
        patience: the timeout.
        whom: name of the peer, for progress messages.

    Returns:
        An empty string, or the last connection error after a timeout.
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
    """Format an address as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens on this port yet, or a firewall rejects it"
    if isinstance(error, TimeoutError):
        return "timed out: wrong address, or a firewall drops the packets"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"{error.strerror}: the host is in no reachable network"
    return error.strerror or str(error)


def _to_stderr(line: str) -> None:
    print(f"halftune: {line}", file=sys.stderr, flush=True)
