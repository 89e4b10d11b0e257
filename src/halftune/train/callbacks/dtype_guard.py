"""``dtypes.json``: the dtype of every tensor; ``guard.json``: what had to be cast on its way to attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halftune.core.atomic import write_text
from halftune.core.log import get_logger
from halftune.model.attention.register import current_guard
from halftune.precision.guard import Guard
from halftune.precision.report import dtype_report
from halftune.train.callback import Callback, StepMetrics
from halftune.train.state import TrainState

log = get_logger(__name__)


class DtypeGuard(Callback):
    """Writes down how the dtypes are at the start, and the guard's counters at the end."""

    def __init__(self) -> None:
        self.guard: Guard | None = None

    def on_start(self, run: TrainState) -> None:
        """Writes ``dtypes.json``, and tells the guard the names of the model's modules."""
        self.guard = current_guard()
        self.guard.watch(run.model)
        if run.is_main:
            _write(run.folder / "dtypes.json", dtype_report(run.model, run.plan.precision).to_dict())

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """Stops a run whose model caught the guard's refusal and went on without attention.

        Raises:
            DtypeContractError: a call of this step was refused.
        """
        if self.guard is not None:
            self.guard.check()

    def on_end(self, run: TrainState, error: BaseException | None) -> None:
        """Writes ``guard.json``; casts of this launch only, and of this process."""
        if self.guard is None or not run.is_main:
            return
        found = self.guard.report()
        _write(run.folder / "guard.json", found)
        if found["casts"]:
            log.warning(
                "%s attention calls had operands outside the planned dtype, at %s; guard.json lists them",
                f"{found['casts']:,}",
                "one place" if len(found["sites"]) == 1 else f"{len(found['sites'])} places",
            )


def _write(path: Path, values: dict[str, Any]) -> None:
    try:
        write_text(path, json.dumps(values, indent=1))
    except OSError as error:
        log.warning("cannot write %s: %s", path, error.strerror)
