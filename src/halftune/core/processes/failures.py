"""Failure records of processes, in torchrun's error file format, for the summary of a run."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halftune.core.errors import HalftuneError, TrainingError

FILE = "TORCHELASTIC_ERROR_FILE"  # path of the error file, set by torchrun
NAMED = re.compile(r"rank (\d+) ")  # beginning of a message that names the failed rank
SUMMARY = "HALFTUNE_SUMMARY"  # set by the process that prints the summary, so that ranks do not print errors


class PeerLost(TrainingError):
    """Another process of the run exited or hangs; this one is healthy.

    Attributes:
        named: whether the message names that rank.
    """

    def __init__(self, what: str, *, code: str, remedy: str = "", named: bool = False) -> None:
        super().__init__(what, code=code, remedy=remedy)
        self.named = named


@dataclass(frozen=True)
class Record:
    """The failure of one process.

    Attributes:
        text: message for the user.
        time: seconds since the epoch.
        lost: whether it only lost a peer.
        names_rank: whether the message names the failed rank.
        stopped: whether it was stopped by a signal without failing.
    """

    text: str
    time: float
    lost: bool = False
    names_rank: bool = False
    stopped: bool = False

    @property
    def is_root_cause(self) -> bool:
        """Whether this is the root cause of the job's failure, independent of other records."""
        return not self.stopped and (self.names_rank or not self.lost)


def record_failure(error: BaseException, text: str) -> bool:
    """Record this process's failure for the launcher; returns whether the launcher will print a summary.

    Only the first call is recorded: the first error is the cause.
    """
    path = os.environ.get(FILE)
    if path:
        lost = isinstance(error, PeerLost)
        names = isinstance(error, PeerLost) and error.named
        stopped = isinstance(error, HalftuneError) and error.exit_code >= 128
        write(Path(path), Record(text, time.time(), lost, names, stopped))
    return bool(path) and os.environ.get(SUMMARY) == "1"


def write(path: Path, record: Record) -> None:
    """Write the file in torchrun's format, unless it exists."""
    extra = {"py_callstack": record.text, "timestamp": str(int(record.time))}
    own = {name: value for name, value in asdict(record).items() if name != "text"}
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump({"message": {"message": record.text, "extraInfo": extra, "halftune": own}}, file)
    except OSError:  # the exit code remains
        return


def read(path: Path) -> Record | None:
    """Read a process's record; None if it is missing or incomplete."""
    try:
        return from_message(json.loads(path.read_text(encoding="utf-8"))["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def from_message(message: Any) -> Record | None:
    """Parse a record that torch read from an error file; None if the process wrote none."""
    if not isinstance(message, dict):
        return None
    own = message.get("halftune")
    if isinstance(own, dict):
        flags = {name: bool(own[name]) for name in ("lost", "names_rank", "stopped")}
        return Record(str(message["message"]), float(own["time"]), **flags)
    stamp = message.get("extraInfo", {}).get("timestamp", 0)
    return Record(str(message.get("message", "")).splitlines()[-1], float(stamp))
