"""Identifies processes beyond their PID, which the system reuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def identity(pid: int) -> str | None:
    """Return boot id and start time of a process, which distinguish it from a later one with the same PID.

    Returns:
        None if there is no such process, or it is a zombie.
    """
    if pid <= 0:
        return None
    if not sys.platform.startswith("linux"):
        return _from_ps(pid)
    try:
        # the name in brackets may contain brackets
        state, *rest = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        began = rest[18]  # field 22, in clock ticks since the machine started
        boot = _BOOT.read_text(encoding="ascii").strip()
    except (OSError, ValueError, IndexError):
        return None
    return None if state in "ZX" else f"{boot}:{began}"


def _from_ps(pid: int) -> str | None:
    asked = subprocess.run(["ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, began = asked.stdout.strip().partition(" ")
    return None if not began or state.startswith("Z") else began.strip()


def send(pid: int, known: str, number: signal.Signals) -> bool:
    """Send a signal to a process, only if its :func:`identity` is still ``known``.

    Returns:
        Whether it still existed.

    Raises:
        PermissionError: it belongs to another user.
    """
    if not sys.platform.startswith("linux"):
        if identity(pid) != known:
            return False
        os.kill(pid, number)
        return True
    try:
        handle = os.pidfd_open(pid)  # refers to this process even if its PID is reused
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
