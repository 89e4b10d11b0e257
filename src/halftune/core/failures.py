"""What one of several processes leaves when it fails, in torch's error file, for whoever sums up."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halftune.core.errors import HalftuneError, TrainingError

FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for it
NAMED = re.compile(r"rank (\d+) ")  # how the text of one begins that says which rank is to blame
SUMMARY = "HALFTUNE_SUMMARY"  # set by whoever sums up, so that processes need not speak themselves


class PeerLost(TrainingError):
    """Another process of the run is gone or hangs; this one is sound.

    Attributes:
        named: whether the text says which rank that is.
    """

    def __init__(self, what: str, *, remedy: str = "", named: bool = False) -> None:
        super().__init__(what, remedy=remedy)
        self.named = named


@dataclass(frozen=True)
class Record:
    """How one process failed.

    Attributes:
        text: for the user.
        time: seconds since the epoch.
        lost: it only lost another one.
        names_rank: the text says which rank is to blame.
        stopped: a signal asked it to end; nothing failed.
    """

    text: str
    time: float
    lost: bool = False
    names_rank: bool = False
    stopped: bool = False

    @property
    def settles(self) -> bool:
        """Whether this says what the job ends of, whatever others may still have to say."""
        return not self.stopped and (self.names_rank or not self.lost)


def leave(error: BaseException, text: str) -> bool:
    """Writes down how this process fails, where a launcher looks for it; whether somebody will sum up.

    Only the first call counts: what came first is what went wrong.
    """
    path = os.environ.get(FILE)
    if path:
        lost = isinstance(error, PeerLost)
        names = isinstance(error, PeerLost) and error.named
        stopped = isinstance(error, HalftuneError) and error.exit_code >= 128
        write(Path(path), Record(text, time.time(), lost, names, stopped))
    return bool(path) and os.environ.get(SUMMARY) == "1"


def write(path: Path, record: Record) -> None:
    """Writes the file as torchrun wants it, unless there is one."""
    extra = {"py_callstack": record.text, "timestamp": str(int(record.time))}
    own = {name: value for name, value in asdict(record).items() if name != "text"}
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump({"message": {"message": record.text, "extraInfo": extra, "halftune": own}}, file)
    except OSError:  # no disk: the exit code must do
        return


def read(path: Path) -> Record | None:
    """What a process has left so far; None where it has not, or not to the end of the file."""
    try:
        return from_message(json.loads(path.read_text(encoding="utf-8"))["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def from_message(message: Any) -> Record | None:
    """The record in what torch read from an error file; None where the process left none."""
    if not isinstance(message, dict):
        return None
    own = message.get("halftune")
    if isinstance(own, dict):
        flags = {name: bool(own[name]) for name in ("lost", "names_rank", "stopped")}
        return Record(str(message["message"]), float(own["time"]), **flags)
    stamp = message.get("extraInfo", {}).get("timestamp", 0)
    return Record(str(message.get("message", "")).splitlines()[-1], float(stamp))
