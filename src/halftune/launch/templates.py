"""Jobs for schedulers: each machine runs the same command and gets its rank from the scheduler."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

from halftune.config.run import RunConfig
from halftune.core.errors import ConfigError, DtypeContractError, MissingPackageError, ModelError
from halftune.launch.command import command

GRACE = 120  # seconds from SIGTERM to SIGKILL, for finishing the step and saving a checkpoint
# Exit codes after which a retry would fail again: see core/errors.py; the last is a bug.
FINAL = (*sorted({one.exit_code for one in (ConfigError, ModelError, DtypeContractError, MissingPackageError)}), 70)
_CORES = 8  # per process, for data and torch's threads; Slurm's default is one core per task


class Job(NamedTuple):
    """A scheduler's job.

    Attributes:
        file: its template in the folder ``jobs``.
        rank, host: shell words for a machine's rank and the address of machine 0.
    """

    file: str
    rank: str
    host: str


TEMPLATES = {
    "slurm": Job("slurm.sh", "$SLURM_NODEID", "$MAIN"),
    "kubernetes": Job("kubernetes.yaml", "$JOB_COMPLETION_INDEX", "halftune-machine-0-0.halftune"),
    "skypilot": Job("skypilot.yaml", "$SKYPILOT_NODE_RANK", "$MAIN"),
}


def render(name: str, config: RunConfig, world_size: int, arguments: Sequence[str]) -> str:
    """Return a job's text: a batch script or YAML."""
    job, asked = TEMPLATES[name], config.distributed
    line = shell_command(config, world_size, list(arguments), job.rank, job.host)
    each = world_size // asked.num_machines
    text = files("halftune.launch").joinpath("jobs", job.file).read_text(encoding="utf-8")
    return text.format(
        machines=asked.num_machines,
        each=each,
        cores=_CORES * each,
        grace=GRACE,
        line=line,
        quoted=shlex.quote(line),
        json=json.dumps(line, ensure_ascii=False),
        port=asked.main_process_port,
        store_port=asked.main_process_port + 1,
        max_restarts=asked.max_restarts,
        final=", ".join(map(str, FINAL)),
    )


def shell_command(config: RunConfig, world_size: int, arguments: list[str], rank: str, host: str) -> str:
    """Return the command of one machine as a shell line, with shell words for its rank and the address of machine 0.

    Args:
        config: the run.
        world_size: processes over all machines.
        arguments: of ``halftune``.
        rank, host: shell words such as ``$SLURM_NODEID``.
    """
    several = config.distributed.num_machines > 1
    known = (f'"{rank}"', f'"{host}"') if several else ("", "")
    words = command(config.distributed, world_size, arguments, known=known)
    own = words[1 : len(words) - len(arguments)]  # torchrun's part, which needs no quotes
    # exec: signals of the scheduler must reach the launcher, not a shell
    return " ".join(["exec", "python", *own, *map(shlex.quote, arguments)])
