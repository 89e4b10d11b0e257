"""This process and its launcher, from the environment; and processes beyond their PID, which the system reuses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from halftune.core.errors import PlanError

# Variables that torchrun and accelerate set for each process.
NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Variables of launchers that halftune does not support (MPI, Slurm's PMI), but accelerate reads.
OTHERS = ("OMPI_COMM_WORLD_", "PMI_", "MV2_COMM_WORLD_", "MPI_LOCAL")
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_REMEDY = "start the run with `halftune train` or torchrun, or unset the variable"


@dataclass(frozen=True)
class Process:
    """A process of a run.

    Attributes:
        rank: global rank.
        local_rank: rank on its node.
        world_size: number of processes.
        launched: whether a launcher started it.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False

    @property
    def main(self) -> bool:
        """Whether it writes files and logs (rank 0)."""
        return self.rank == 0


ALONE = Process()


def this_process() -> Process:
    """Return this process from the environment: launched if RANK and WORLD_SIZE are set, else alone.

    Raises:
        PlanError: a variable has an invalid value, or WORLD_SIZE is above 1 and another variable is missing.
    """
    world_size = _number("WORLD_SIZE", 1)
    if world_size is None or (world_size == 1 and not os.environ.get("RANK")):
        return ALONE  # RANK without WORLD_SIZE may be unrelated
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if world_size > 1 and missing:
        what = f"WORLD_SIZE is {world_size}, but these variables are not set: {', '.join(missing)}"
        raise PlanError(what, where="WORLD_SIZE", remedy=_REMEDY, code="launch.bad_environment")
    rank, local_rank = _number("RANK", 0) or 0, _number("LOCAL_RANK", 0) or 0
    if rank >= world_size:
        what = f"rank {rank} of {world_size} processes; expected 0 to {world_size - 1}"
        raise PlanError(what, where="RANK, WORLD_SIZE", remedy=_REMEDY, code="launch.bad_environment")
    if world_size > 1:
        _number("MASTER_PORT", 1, most=65_535)
    return Process(rank, local_rank, world_size, launched=True)


def ignored() -> list[str]:
    """Return ``NAME=value`` of each launcher variable that is ignored because this process runs alone."""
    if this_process().launched:
        return []
    names = [name for name in ("RANK", "LOCAL_RANK") if os.environ.get(name)]
    names += [f"{prefix}SIZE" for prefix in OTHERS if os.environ.get(f"{prefix}SIZE", "1") not in ("", "1")]
    return [f"{name}={os.environ[name]}" for name in names]


@contextmanager
def hidden() -> Iterator[None]:
    """Inside, variables are hidden from which libraries would read another world size than :func:`this_process`."""
    alone = this_process().world_size == 1
    names = [name for name in os.environ if name.startswith(OTHERS) or (alone and name in _NAMES)]
    taken = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(taken)


def _number(name: str, least: int, most: int = 1_000_000) -> int | None:
    """The value of a variable; None if it is not set.

    Raises:
        PlanError: it is not an integer, below ``least`` or above ``most``.
    """
    text = os.environ.get(name)
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
        what = f"expected an integer from {least} to {most}, got {text[:40]!r}"
        raise PlanError(what, where=name, remedy=_REMEDY, code="launch.bad_environment")
    return int(text)


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
