"""Summary of a failed job: the process that failed first, and its error."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halftune.core.processes.failures import NAMED, Record

FAILED = 5  # as TrainingError


@dataclass(frozen=True)
class Failure:
    """The end of a failed process.

    Attributes:
        rank, pid: of the process.
        code: exit code; the negative number of a signal.
        record: its failure record; None if it wrote none.
        seen: when its end was noticed, in seconds since the epoch.
        killed: whether the launcher killed it because another process failed.
    """

    rank: int
    pid: int
    code: int
    record: Record | None
    seen: float = 0.0
    killed: bool = False


def first_of(failures: Sequence[Failure]) -> Failure:
    """Return the root cause.

    Order: errors of processes, then killed processes, then processes that only lost a peer, then those that the
    launcher ended.
    """

    def order(one: Failure) -> tuple[int, float, int]:
        if one.record is not None:
            return (2 if one.record.lost else 0), one.record.time, one.rank
        ended = one.killed or one.code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        return (3 if ended else 1), one.seen, one.rank

    return min(failures, key=order)


def stopped(failures: Mapping[int, Failure]) -> bool:
    """Whether the job was stopped by a signal."""
    first = first_of(list(failures.values()))
    return first.record is not None and first.record.stopped


def summary(failures: Mapping[int, Failure], max_restarts: int) -> tuple[str, int]:
    """Return the summary of failed processes, and the exit code."""
    first = first_of(list(failures.values()))
    if first.record is not None:
        text, code = first.record.text, first.code if first.code > 0 else FAILED
        whole = first.record.stopped or NAMED.match(text)
        head = text if whole else f"rank {first.rank} on {socket.gethostname()}: {text}"
    else:
        code = FAILED
        how = f"was killed by {signal.Signals(-first.code).name}" if first.code < 0 else f"exited with {first.code}"
        why = " (out of memory?)" if first.code == -signal.SIGKILL else ""
        head = f"rank {first.rank} on {socket.gethostname()} (process {first.pid}) {how}{why}"
    named = NAMED.match(head)  # may name another rank than the first record's
    lines = [head]
    if others := sorted(set(failures) - ({int(named[1])} if named else set())):
        lines.append(f"  terminated as a consequence: rank {', '.join(map(str, others))}")
    if max_restarts:
        lines.append(f"  failed after {max_restarts} restarts (distributed.max_restarts)")
    return "\n".join(lines), code


def say(text: str, code: int) -> int:
    """Print a message of the launcher; returns the exit code."""
    print(f"halftune: {text}", file=sys.stderr, flush=True)
    return code
