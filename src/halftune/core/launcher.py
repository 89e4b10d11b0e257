"""Which process of a run this is: the one place that reads what a launcher has set."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from halftune.core.errors import PlanError

# What torchrun and accelerate give each of several processes that they start.
NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The same from launchers that halftune is not started by (MPI, Slurm's PMI), but accelerate listens to.
OTHERS = ("OMPI_COMM_WORLD_", "PMI_", "MV2_COMM_WORLD_", "MPI_LOCAL")
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_REMEDY = "start the run with `halftune train` or torchrun, or unset the variable"


@dataclass(frozen=True)
class Process:
    """One process of a run.

    Attributes:
        rank: its number, from 0.
        local_rank: its number on its machine, from 0.
        world_size: processes of the run.
        launched: a launcher has started it.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False

    @property
    def main(self) -> bool:
        """Whether it writes files and speaks."""
        return self.rank == 0


ALONE = Process()


def this_process() -> Process:
    """This process, by the environment: launched where RANK and WORLD_SIZE are set, else alone.

    Raises:
        PlanError: a variable has no valid value, or WORLD_SIZE names several processes and another variable is missing.
    """
    world_size = _number("WORLD_SIZE", 1)
    if world_size is None or (world_size == 1 and not os.environ.get("RANK")):
        return ALONE  # RANK without WORLD_SIZE may be anybody's variable
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if world_size > 1 and missing:
        what = f"{world_size} processes, but not set: {', '.join(missing)}"
        raise PlanError(what, where="WORLD_SIZE", remedy=_REMEDY)
    rank, local_rank = _number("RANK", 0) or 0, _number("LOCAL_RANK", 0) or 0
    if rank >= world_size:
        what = f"rank {rank} of {world_size} processes; expected 0 to {world_size - 1}"
        raise PlanError(what, where="RANK, WORLD_SIZE", remedy=_REMEDY)
    if world_size > 1:
        _number("MASTER_PORT", 1, most=65_535)
    return Process(rank, local_rank, world_size, launched=True)


def ignored() -> list[str]:
    """``NAME=value`` of each variable of a launcher that has no effect, because this process runs alone."""
    if this_process().launched:
        return []
    names = [name for name in ("RANK", "LOCAL_RANK") if os.environ.get(name)]
    names += [f"{prefix}SIZE" for prefix in OTHERS if os.environ.get(f"{prefix}SIZE", "1") not in ("", "1")]
    return [f"{name}={os.environ[name]}" for name in names]


@contextmanager
def hidden() -> Iterator[None]:
    """Inside ``with``, a library that reads the environment finds as many processes as :func:`this_process` does."""
    alone = this_process().world_size == 1
    names = [name for name in os.environ if name.startswith(OTHERS) or (alone and name in _NAMES)]
    taken = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(taken)


def _number(name: str, least: int, most: int = 1_000_000) -> int | None:
    """The value of a variable; None where it is not set.

    Raises:
        PlanError: it is no integer, below ``least`` or above ``most``.
    """
    text = os.environ.get(name)
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise PlanError(f"expected an integer from {least} to {most}, got {text[:40]!r}", where=name, remedy=_REMEDY)
    return int(text)
