"""MLflow, SwanLab and Trackio through accelerate's trackers, where ``logging.report_to`` names them."""

from __future__ import annotations

import json
import os
from typing import Any

from halftune.core.atomic import write_text
from halftune.core.files import read_text
from halftune.core.optional import need
from halftune.train.callbacks.trackers.logger import Logger
from halftune.train.state import TrainState

PROJECT = "halftune"  # the default; each package's own environment variable names another


class Tracker(Logger):
    """One run of a tracker per run folder: a resumed run continues it."""

    failures = (Exception,)  # clients of services raise what their HTTP libraries raise

    def open(self, run: TrainState) -> None:
        """Starts or continues the run, with the resolved configuration."""
        need(self.name, why=f"logging.report_to: [{self.name}]")
        kept = run.folder / f"{self.name}_id.txt"
        known = read_text(kept).strip() if run.step and kept.exists() else None
        self.tracker = self.make(run.config.logging.run_name or run.folder.name, known)
        self.tracker.start()
        write_text(kept, self.identity())
        if known is None:
            self.tracker.store_init_configuration(_flat(run.config.model_dump(mode="json")))

    def make(self, name: str, known: str | None) -> Any:
        """The tracker of accelerate, not started, for a new run or for the one with a known identity."""
        raise NotImplementedError

    def identity(self) -> str:
        """What the started run is continued by."""
        raise NotImplementedError

    def send(self, step: int, numbers: dict[str, float]) -> None:
        """All numbers of a step at once."""
        self.tracker.log(numbers, step=step)

    def close(self, failed: bool) -> None:
        """Ends the run in the tracker."""
        self.tracker.finish()


class MLflow(Tracker):
    """Where ``MLFLOW_TRACKING_URI`` says; the experiment is ``MLFLOW_EXPERIMENT_NAME``."""

    name = "mlflow"

    def make(self, name: str, known: str | None) -> Any:
        """A run of the experiment."""
        from accelerate.tracking import MLflowTracker

        return MLflowTracker(PROJECT, run_id=known, run_name=None if known else name)

    def identity(self) -> str:
        """The id of the run."""
        return str(self.tracker.tracker.info.run_id)

    def close(self, failed: bool) -> None:
        """Marks the run as finished or failed."""
        import mlflow  # pyright: ignore[reportMissingImports]

        mlflow.end_run("FAILED" if failed else "FINISHED")


class SwanLab(Tracker):
    """Project by ``SWANLAB_PROJECT``, mode by ``SWANLAB_MODE``."""

    name = "swanlab"

    def make(self, name: str, known: str | None) -> Any:
        """An experiment of the project."""
        from accelerate.tracking import SwanLabTracker

        more = {"id": known, "resume": "allow"} if known else {}
        return SwanLabTracker(os.environ.get("SWANLAB_PROJECT", PROJECT), experiment_name=name, **more)

    def identity(self) -> str:
        """The id of the experiment."""
        return str(self.tracker.tracker.id)


class Trackio(Tracker):
    """Project by ``TRACKIO_PROJECT``; runs lie in ``TRACKIO_DIR``."""

    name = "trackio"

    def make(self, name: str, known: str | None) -> Any:
        """A run of the project."""
        from accelerate.tracking import TrackioTracker

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        return TrackioTracker(project, name=known or name, resume="must" if known else "never")

    def identity(self) -> str:
        """The name of the run."""
        return str(self.tracker.tracker.name)


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"model": {"name": 1}}`` → ``{"model.name": 1}``; lists become JSON."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return found
