"""``report.html``: written after every evaluation and at the end, also of a run that was stopped."""

from __future__ import annotations

from halftune.train.callbacks.base import Callback
from halftune.train.report.page import Status, write_report
from halftune.train.state import TrainState


class Report(Callback):
    """Comes last: it reads what the other callbacks have written."""

    watches = True

    def on_evaluate(self, run: TrainState, metrics: dict[str, float]) -> None:
        """The report so far."""
        self._write(run, Status("running", f"step {run.step:,} of {run.total_steps:,}"))

    def on_end(self, run: TrainState, error: BaseException | None) -> None:
        """The whole report."""
        if error is None:
            self._write(run, Status("finished", f"stopped early: {run.stop}" if run.stop else ""))
        else:
            self._write(run, Status("stopped", str(error) or type(error).__name__))

    def _write(self, run: TrainState, status: Status) -> None:
        if not run.is_main:
            return
        write_report(run.folder, status)
