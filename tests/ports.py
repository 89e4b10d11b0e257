"""Ports of 127.0.0.1 for what a test starts."""

from __future__ import annotations

import socket

_HELD: list[socket.socket] = []


def port() -> int:
    """A port at which nobody listens; the system gives it to nobody else while the test's process lives.

    It is bound here and stays so. Linux lets one more program bind it that sets ``SO_REUSEADDR``, as torch's stores do,
    and looks elsewhere for whoever asks for any port.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    _HELD.append(held)
    return held.getsockname()[1]
