"""Which process is which: a number alone is given to another process once its owner has gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def identity(pid: int) -> str | None:
    """What tells a process from a later one with the same number: when it began, and in which boot of the machine.

    Returns:
        None where there is no such process, or it has ended and only waits for its parent to ask how.
    """
    if pid <= 0:
        return None
    if not sys.platform.startswith("linux"):
        return _asked(pid)
    try:
        # the name in brackets may hold anything, brackets too
        state, *rest = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        began = rest[18]  # field 22, in clock ticks since the machine started
        boot = _BOOT.read_text(encoding="ascii").strip()
    except (OSError, ValueError, IndexError):
        return None
    return None if state in "ZX" else f"{boot}:{began}"


def _asked(pid: int) -> str | None:
    asked = subprocess.run(["ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, began = asked.stdout.strip().partition(" ")
    return None if not began or state.startswith("Z") else began.strip()


def send(pid: int, known: str, number: signal.Signals) -> bool:
    """Sends a signal to the process that :func:`identity` gave ``known`` for, and to no other.

    Returns:
        whether it was there.

    Raises:
        PermissionError: it belongs to someone else.
    """
    if not sys.platform.startswith("linux"):
        if identity(pid) != known:
            return False
        os.kill(pid, number)
        return True
    try:
        handle = os.pidfd_open(pid)  # stays with this process, whatever becomes of its number
    except ProcessLookupError:
        return False
    try:
        if identity(pid) != known:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True
