"""Where an exported model may be written; told before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from halftune.core.errors import ModelError


def check_output(run: Path, final: Path, output: Path, *, force: bool, how: str = "--force replaces it") -> None:
    """Refuses to write over what is there, unless it is an earlier model and ``force`` says so.

    Args:
        run: the run folder.
        final: the folder of its result.
        output: where to write.
        force: whether an earlier model may be replaced.
        how: the remedy where there is one.

    Raises:
        ModelError: with what is in the way.
    """
    own = run.resolve()
    if output.resolve() in (own, own / "final", *final.resolve().parents, final.resolve()):
        raise ModelError("the output folder is the run's own", where=str(output), remedy="choose another folder")
    if output.is_file():
        raise ModelError("the output is a file", where=str(output), remedy="choose a folder")
    if output.is_dir() and any(output.iterdir()):
        if not (output / "config.json").is_file():
            raise ModelError("the folder holds other things", where=str(output), remedy="choose an empty or new one")
        if not force:
            raise ModelError("there is a model already", where=str(output), remedy=how)
