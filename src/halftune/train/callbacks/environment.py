"""Writes ``environment.json`` at the start of a run."""

from __future__ import annotations

import json

from halftune.core.atomic import write_text
from halftune.core.log import get_logger
from halftune.hardware.probe import probe
from halftune.train.callbacks.base import Callback
from halftune.train.environment import environment
from halftune.train.state import TrainState

log = get_logger(__name__)
NAME = "environment.json"


class Environment(Callback):
    """Versions, machine, git commit, and what the run is made of. Of several sittings, the last one's are kept."""

    watches = True

    def on_start(self, run: TrainState) -> None:
        """Writes the file on the main process."""
        if not run.is_main:
            return
        sources, made = (*run.config.data.train, *run.config.data.eval), run.inputs
        fingerprints = [*made["train_data"], *made["eval_data"]]
        data = {source.path: fingerprint for source, fingerprint in zip(sources, fingerprints, strict=True)}
        facts = environment(probe(), data) | made
        try:
            write_text(run.folder / NAME, json.dumps(facts, indent=1))
        except OSError as error:
            log.warning("cannot write %s: %s", run.folder / NAME, error.strerror)
