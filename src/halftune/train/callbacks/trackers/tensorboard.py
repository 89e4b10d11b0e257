"""TensorBoard, where ``logging.report_to`` names it: event files in the run folder's ``tensorboard/``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

from halftune.core.optional import need
from halftune.train.callbacks.trackers.logger import Logger
from halftune.train.state import TrainState

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoard(Logger):
    """Scalars per window, and the configuration as text. A run that goes on hides what it will measure again."""

    name = "tensorboard"

    def open(self, run: TrainState) -> None:
        """Opens an event file; steps after the restored one are purged from TensorBoard's view."""
        need("tensorboard", why="logging.report_to: [tensorboard]")
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer: SummaryWriter = SummaryWriter(
            str(self.place(run) / self.name), purge_step=run.step + 1 if run.step else None
        )
        text = yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        self.writer.add_text("configuration", "    " + text.replace("\n", "\n    "), run.step)

    def send(self, step: int, numbers: dict[str, float]) -> None:
        """One scalar a name."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, failed: bool) -> None:
        """Flushes and closes the event file."""
        self.writer.close()
