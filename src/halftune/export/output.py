"""Where an exported model may be written; told before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from halftune.core.errors import ModelError
from halftune.model.finished import FinishedRun


def check_output(run: FinishedRun, output: Path, *, force: bool) -> None:
    """Refuses to write over what is there, unless it is an earlier model and ``force`` says so.

    Raises:
        ModelError: with what is in the way.
    """
    own = run.folder.resolve()
    if output.resolve() in (own, own / "final", *run.final.resolve().parents, run.final.resolve()):
        raise ModelError("the output folder is the run's own", where=str(output), remedy="choose another --output")
    if output.is_file():
        raise ModelError("the output is a file", where=str(output), remedy="choose a folder")
    if output.is_dir() and any(output.iterdir()):
        if not (output / "config.json").is_file():
            raise ModelError("the folder holds other things", where=str(output), remedy="choose an empty or new one")
        if not force:
            raise ModelError("there is a model already", where=str(output), remedy="--force replaces it")
