"""Writes ``environment.json`` at the start of a run."""

from __future__ import annotations

import json

from halftune.config.run import RunConfig
from halftune.core.atomic import write_text
from halftune.core.errors import DataError
from halftune.core.log import get_logger
from halftune.data.sources import open_source
from halftune.hardware.probe import probe
from halftune.train.callbacks.base import Callback, Run
from halftune.train.environment import environment

log = get_logger(__name__)
NAME = "environment.json"


class Environment(Callback):
    """Versions, machine, git commit and the data's fingerprints. Of several sittings, the last one's are kept."""

    watches = True

    def on_start(self, run: Run) -> None:
        """Writes the file on the main process."""
        if not run.is_main:
            return
        facts = environment(probe(), fingerprints(run.config))
        try:
            write_text(run.folder / NAME, json.dumps(facts, indent=1))
        except OSError as error:
            log.warning("cannot write %s: %s", run.folder / NAME, error.strerror)


def fingerprints(config: RunConfig) -> dict[str, str]:
    """Data source → fingerprint of its content."""
    found = {}
    for section in (*config.data.train, *config.data.eval):
        try:
            found[section.path] = open_source(section).fingerprint
        except DataError as error:  # tokenised from the cache, or moved away since
            found[section.path] = f"unknown: {error}"
    return found
