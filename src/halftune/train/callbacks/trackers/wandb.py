"""Weights & Biases, where ``logging.report_to`` names it."""

from __future__ import annotations

from typing import Any

from halftune.core.atomic import write_text
from halftune.core.files import read_text
from halftune.core.optional import need
from halftune.train.callbacks.trackers.logger import Logger
from halftune.train.state import TrainState


class WeightsAndBiases(Logger):
    """One W&B run per run folder: going on from a checkpoint goes on with it. Project and mode by ``WANDB_*``."""

    name = "wandb"

    def open(self, run: TrainState) -> None:
        """Starts the W&B run, with the resolved configuration."""
        wandb: Any = need("wandb", why="logging.report_to: [wandb]")
        self.failures = (*Logger.failures, wandb.Error)
        kept = run.folder / "wandb_id.txt"
        known = read_text(kept).strip() if run.step and kept.exists() else None
        self.run = wandb.init(
            id=known,
            resume="allow" if known else None,
            name=run.config.logging.run_name or run.folder.name,
            dir=str(self.place(run)),
            config=run.config.model_dump(mode="json"),
        )
        write_text(kept, self.run.id)

    def send(self, step: int, numbers: dict[str, float]) -> None:
        """All numbers of a step at once."""
        self.run.log(numbers, step=step)

    def close(self, failed: bool) -> None:
        """Marks the W&B run as finished or failed."""
        self.run.finish(exit_code=int(failed))
