"""Writes ``environment.json`` at the start of a run: versions, machine, commit and data, to reproduce it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from halftune import __version__
from halftune.core.atomic import write_text
from halftune.core.log import get_logger
from halftune.core.optional import version_of
from halftune.hardware import Hardware
from halftune.hardware.probe import PACKAGES as OF_KERNELS
from halftune.hardware.probe import probe
from halftune.train.callback import Callback
from halftune.train.state import TrainState

# What numbers and data depend on; the optional ones are listed where they are installed.
PACKAGES = (*OF_KERNELS, "datasets", "tokenizers", "safetensors", "numpy")


def environment(hardware: Hardware, fingerprints: dict[str, str], folder: Path | None = None) -> dict[str, Any]:
    """The environment as plain data.

    Args:
        hardware: the machine.
        fingerprints: data source → fingerprint of its content.
        folder: whose git commit is noted: that of the recipe and the data; the working directory by default.
    """
    machine = asdict(hardware)
    for device in machine["devices"]:
        device["features"] = sorted(device["features"])
    return {
        "halftune": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        "hardware": machine,
        "git": git_state(folder or Path.cwd()),
        "data": fingerprints,
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the work tree that ``folder`` stands in, and whether it was changed since; None outside of one.

    ``changed`` is None where git cannot say. The repository may be anybody's, and its configuration can name programs
    that ``git status`` runs (``core.fsmonitor``, filters): status is asked with an empty configuration.
    """
    asked = _git(folder, "rev-parse", "HEAD", "--show-toplevel", "--absolute-git-dir", "--git-common-dir")
    if asked is None or len(asked.splitlines()) != 4:  # a bare repository, or a line break in a name
        return None
    commit, top, own, common = asked.splitlines()
    with TemporaryDirectory(prefix="halftune-git-") as clean:
        (Path(clean) / "HEAD").write_text(f"{commit}\n", encoding="ascii")
        (Path(clean) / "refs").mkdir()
        places = {
            "GIT_DIR": clean,
            "GIT_WORK_TREE": top,
            "GIT_INDEX_FILE": os.path.join(own, "index"),
            "GIT_OBJECT_DIRECTORY": os.path.join(folder, common, "objects"),
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_NO_LAZY_FETCH": "1",
        }
        # a submodule has a configuration of its own, which status would read
        only = ("--porcelain", "--untracked-files=no", "--ignore-submodules=all")
        changes = _git(Path(top), "status", *only, **places)
    return {"commit": commit, "changed": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str, **places: str) -> str | None:
    """What git says, without the space around it; None where it fails."""
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, env={**os.environ, **places}, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout).strip() if done.returncode == 0 else None  # names of folders may be any bytes


log = get_logger(__name__)
NAME = "environment.json"


class Environment(Callback):
    """Versions, machine, git commit, and what the run is made of. Of several launches, the last one's are kept."""

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
