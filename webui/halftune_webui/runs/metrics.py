"""``metrics.jsonl`` as series of numbers, read on from where the last look ended."""

from __future__ import annotations

import json
import math
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halftune.core.files import open_file
from halftune_webui.runs.log_tail import METRICS, is_number

# the curves; speeds are tokens by the seconds of their steps, memory is in GiB
COLUMNS = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "memory")
_MOST = 16 * 2**20  # bytes read at one look: hundreds of thousands of lines


@dataclass
class Series:
    """Numbers over steps: ``steps[i]`` has ``values[i]``; NaN where the run had no finite number."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: float, value: Any) -> None:
        """One more point; what is no number becomes NaN."""
        self.steps.append(step)
        self.values.append(float(value) if is_number(value) else math.nan)


@dataclass(frozen=True)
class Alarm:
    """Something that a person should see at once.

    Attributes:
        kind: ``loss_not_finite | norm_not_finite | loss_zero | norm_zero | skipped``.
        step: where it was first seen.
        count: in how many lines.
    """

    kind: str
    step: int
    count: int


class Metrics:
    """The metrics of one run.

    Attributes:
        series: one for each of ``COLUMNS``.
        tokens, seconds: over the same steps as the loss: tokens fed, and seconds of training, since the first step.
        last: the last line that has a loss.
        version: counts the looks that found something new.
    """

    def __init__(self, run: Path) -> None:
        self.path, self.version = run / METRICS, 0
        self._begin()

    def _begin(self) -> None:
        self.series = {name: Series() for name in COLUMNS}
        self.tokens, self.seconds = Series(), Series()
        self.last: dict[str, Any] = {}
        self._alarms: dict[str, tuple[int, int]] = {}
        self._offset, self._inode, self._seen = 0, 0, b""

    @property
    def alarms(self) -> list[Alarm]:
        """What has been odd so far; a loss or norm of zero counts once two lines in a row have it."""
        return [
            Alarm(kind, step, count) for kind, (step, count) in self._alarms.items() if "zero" not in kind or count > 1
        ]

    def update(self) -> bool:
        """Reads what is new; whether anything was."""
        changed = self._update()
        self.version += changed
        return changed

    def _update(self) -> bool:
        """Reads on.

        A run that goes on from a checkpoint cuts the file back: the end of what has been read is compared, and where it
        is not there any more, the file is read anew.
        """
        try:
            with open_file(self.path) as file:
                found = self._continue(file)
                data = file.read(_MOST)
        except OSError:
            had = bool(self._offset)
            self._begin()
            return had
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half written
        if not whole and len(data) == _MOST:  # no line of metrics is so long: let go
            whole = data
        for line in whole.splitlines():
            self._take(line)
        self._offset += len(whole)
        if whole:
            self._seen = (self._seen + whole)[-256:]
        return bool(whole) or not found

    def _continue(self, file: Any) -> bool:
        """Sets the file to where reading goes on; False where that is the beginning again."""
        inode = os.fstat(file.fileno()).st_ino
        if inode == self._inode and self._offset:
            file.seek(self._offset - len(self._seen))
            if file.read(len(self._seen)) == self._seen:
                return True
        had = bool(self._offset)
        self._begin()
        self._inode = inode
        file.seek(0)
        return not had

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(entry, dict) or not is_number(entry.get("step")):
            return
        step = float(entry["step"])
        if "eval_loss" in entry:
            self.series["eval_loss"].add(step, entry["eval_loss"])
        if "loss" not in entry:
            return
        self.last = entry
        for name, total in (("tokens", self.tokens), ("seconds", self.seconds)):
            more = entry[name] if is_number(entry.get(name)) else 0
            total.add(step, (total.values[-1] if total.values else 0) + more)
        for name in ("loss", "learning_rate", "grad_norm"):
            if name in entry:
                self.series[name].add(step, entry[name])
        if is_number(entry.get("memory_bytes")):
            self.series["memory"].add(step, entry["memory_bytes"] / 2**30)
        if is_number(entry.get("seconds")) and entry["seconds"] > 0 and is_number(entry.get("tokens")):
            self.series["tokens_per_second"].add(step, entry["tokens"] / entry["seconds"])
        self._watch(int(step), entry)

    def _watch(self, step: int, entry: dict[str, Any]) -> None:
        skipped = entry.get("skipped") or 0
        for kind, odd in (
            ("loss_not_finite", entry["loss"] is None),
            ("norm_not_finite", entry.get("grad_norm", 0.0) is None and not skipped),
            ("loss_zero", entry["loss"] == 0),
            ("norm_zero", entry.get("grad_norm") == 0),
            ("skipped", bool(skipped)),
        ):
            if odd:
                first, count = self._alarms.get(kind, (step, 0))
                self._alarms[kind] = (first, count + 1)
