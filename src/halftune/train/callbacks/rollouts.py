"""``rollouts.json``: the latest answers to a prompt in training, with their rewards."""

from __future__ import annotations

import json
from typing import Any

from halftune.core.atomic import write_text
from halftune.core.log import get_logger
from halftune.train.callback import Callback, StepMetrics
from halftune.train.state import TrainState

log = get_logger(__name__)
NAME, _PROMPTS = "rollouts.json", 5


class RolloutsFile(Callback):
    """Keeps the answers to one prompt of every ``every``-th step, of the last five such steps.

    Args:
        every: steps.
    """

    watches = True

    def __init__(self, every: int) -> None:
        self._every = every
        self._groups: list[dict[str, Any]] = []

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """Writes the file where a step is due."""
        group = getattr(run.rollouts, "shown", None)
        if not run.is_main or group is None or run.step % self._every:
            return
        self._groups = [*self._groups, {"step": run.step, **group}][-_PROMPTS:]
        try:
            write_text(run.folder / NAME, json.dumps({"rollouts": self._groups}, ensure_ascii=False, indent=1))
        except OSError as error:
            log.warning("cannot write %s: %s", run.folder / NAME, error.strerror)
