"""Checks the output folder of an export, before torch is imported."""

from __future__ import annotations

from pathlib import Path

from halftune.core.errors import ModelError


def check_output(run: Path, final: Path, output: Path, *, force: bool, how: str = "use --force to replace it") -> None:
    """Check that the output folder is empty, or contains a model that ``force`` allows to replace.

    Args:
        run: the run folder.
        final: the folder of its result.
        output: the folder to write.
        force: whether an earlier model may be replaced.
        how: the remedy if there is a model.

    Raises:
        ModelError: the folder cannot be used.
    """
    own = run.resolve()
    if output.resolve() in (own, own / "final", *final.resolve().parents, final.resolve()):
        what = "the output folder belongs to the run"
        raise ModelError(what, where=str(output), remedy="choose another folder", code="export.output_unusable")
    if output.is_file():
        what = "the output is a file"
        raise ModelError(what, where=str(output), remedy="choose a folder", code="export.output_unusable")
    if output.is_dir() and any(output.iterdir()):
        if not (output / "config.json").is_file():
            raise ModelError(
                "the folder contains unrelated files",
                where=str(output),
                remedy="choose an empty or new folder",
                code="export.output_unusable",
            )
        if not force:
            raise ModelError(
                "output already contains a model", where=str(output), remedy=how, code="export.output_unusable"
            )
