"""Maps source files of remote code to the model's folder."""

from __future__ import annotations

from pathlib import Path

_folders: list[str] = []  # folders of models whose code runs in this process


def brought_code(folder: str) -> None:
    """Register a model's folder for ``where_written``."""
    if folder not in _folders:
        _folders.append(folder)


def where_written(file: str) -> str:
    """Return ``written_in`` for the registered folder that contains ``file``."""
    return next((found for folder in _folders if (found := written_in(file, folder)) != file), file)


def written_in(file: str, folder: str) -> str:
    """Return the file in the model's folder of which ``file`` is a copy, or ``file`` itself.

    transformers runs a checkpoint's code from a copy in its cache.

    Args:
        file: as Python knows it.
        folder: the model as the recipe names it; no folder for one of the hub, whose copy is all there is.
    """
    own = Path(folder) / Path(file).name
    if folder and "transformers_modules" in file and own.is_file() and own.read_bytes() == Path(file).read_bytes():
        return str(own)
    return file
