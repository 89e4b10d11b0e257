"""What to tell of a job in which processes failed: the one that failed first, and why."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halftune.core.failures import NAMED, Record

FAILED = 5  # as TrainingError


@dataclass(frozen=True)
class Failure:
    """How a process ended.

    Attributes:
        rank, pid: which one.
        code: exit code; the negative number of a signal.
        record: what it left; None where it had no time to.
        seen: when it was seen to have ended, in seconds since the epoch.
        killed: the launcher ended it, because another one had failed.
    """

    rank: int
    pid: int
    code: int
    record: Record | None
    seen: float = 0.0
    killed: bool = False


def first_of(failures: Sequence[Failure]) -> Failure:
    """The failure that the others followed from.

    What went wrong by itself comes first, then a process that was killed, then what only lost another process, then
    those that the launcher ended because of it.
    """

    def order(one: Failure) -> tuple[int, float, int]:
        if one.record is not None:
            return (2 if one.record.lost else 0), one.record.time, one.rank
        ended = one.killed or one.code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        return (3 if ended else 1), one.seen, one.rank

    return min(failures, key=order)


def stopped(failures: Mapping[int, Failure]) -> bool:
    """Whether a signal asked the job to end, and it did."""
    first = first_of(list(failures.values()))
    return first.record is not None and first.record.stopped


def summary(failures: Mapping[int, Failure], max_restarts: int) -> tuple[str, int]:
    """What to tell of several processes that failed, and the exit code."""
    first = first_of(list(failures.values()))
    if first.record is not None:
        text, code = first.record.text, first.code if first.code > 0 else FAILED
        whole = first.record.stopped or NAMED.match(text)
        head = text if whole else f"rank {first.rank} on {socket.gethostname()}: {text}"
    else:
        code = FAILED
        how = f"was killed by {signal.Signals(-first.code).name}" if first.code < 0 else f"left with {first.code}"
        why = " (out of memory?)" if first.code == -signal.SIGKILL else ""
        head = f"rank {first.rank} on {socket.gethostname()} (process {first.pid}) {how}{why}"
    named = NAMED.match(head)  # another one than the first that told, where that one was to blame
    lines = [head]
    if others := sorted(set(failures) - ({int(named[1])} if named else set())):
        lines.append(f"  ended because of it: rank {', '.join(map(str, others))}")
    if max_restarts:
        lines.append(f"  started again {max_restarts} times (distributed.max_restarts), each time it failed")
    return "\n".join(lines), code


def say(text: str, code: int) -> int:
    """Prints a launcher's word; returns the exit code."""
    print(f"halftune: {text}", file=sys.stderr, flush=True)
    return code
