"""``metrics.jsonl`` as series of numbers, read on from where the last look ended."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halftune.core.files import open_file
from halftune.train.report.series import Curves, is_number
from halftune_webui.runs.log_tail import METRICS

CHARTS = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "memory")
_SMOOTH = ("loss", "grad_norm", "tokens_per_second")
_MOST = 16 * 2**20  # bytes read at one look: hundreds of thousands of lines


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


class Metrics(Curves):
    """The metrics of one run."""

    def __init__(self, run: Path) -> None:
        self.path = run / METRICS
        self._begin()

    def _begin(self) -> None:
        super().__init__()
        self._alarms: dict[str, tuple[int, int]] = {}
        self._offset, self._inode, self._seen = 0, 0, b""
        self._drawn: tuple[dict[str, str], str] | None = None

    @property
    def alarms(self) -> list[Alarm]:
        """What has been odd so far; a loss or norm of zero counts once two lines in a row have it."""
        return [
            Alarm(kind, step, count) for kind, (step, count) in self._alarms.items() if "zero" not in kind or count > 1
        ]

    def update(self) -> bool:
        """Reads what is new; whether anything was."""
        if changed := self._update():
            self._drawn = None
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
            with suppress(ValueError, RecursionError):
                if isinstance(entry := json.loads(line), dict):
                    self.take(entry)
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

    def charts(self) -> list[str]:
        """Names of the series that are drawn, each on a chart of its own."""
        return [*(name for name in CHARTS if self[name]), *self.eval_sets().values(), *self.own()]

    def drawn(self, run: str) -> tuple[dict[str, str], str]:
        """The run's line in each chart, and its scale, as JSON; made anew only after something new was read."""
        if self._drawn is None:
            lines = {name: json.dumps(self.line(run, name, smooth=name in _SMOOTH)) for name in self.charts()}
            self._drawn = lines, json.dumps(self.scale())
        return self._drawn

    def take(self, line: dict[str, Any]) -> None:
        """Adds a line, and looks for what is odd in it."""
        super().take(line)
        if is_number(line.get("step")) and "loss" in line:
            self._watch(int(line["step"]), line)

    def _watch(self, step: int, entry: dict[str, Any]) -> None:
        skipped = entry.get("skipped") or 0
        for kind, odd in (
            ("loss_not_finite", entry["loss"] is None),
            ("norm_not_finite", entry.get("grad_norm", 0.0) is None and not skipped),
            ("loss_zero", entry["loss"] == 0 and "reward" not in entry),  # with rewards, its expected value is 0
            ("norm_zero", entry.get("grad_norm") == 0),
            ("skipped", bool(skipped)),
        ):
            if odd:
                first, count = self._alarms.get(kind, (step, 0))
                self._alarms[kind] = (first, count + 1)
