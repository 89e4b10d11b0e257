"""Where a user finds the source file of a model that brings its own code."""

from __future__ import annotations

from pathlib import Path

_folders: list[str] = []  # whose code runs in this process, as recipes name them


def brought_code(folder: str) -> None:
    """Notes a model's folder whose code is about to run, for ``where_written``."""
    if folder not in _folders:
        _folders.append(folder)


def where_written(file: str) -> str:
    """``written_in`` for whichever of the folders that brought code in this process."""
    return next((found for folder in _folders if (found := written_in(file, folder)) != file), file)


def written_in(file: str, folder: str) -> str:
    """The file in the model's folder that ``file`` is a copy of, or ``file`` itself.

    transformers runs a checkpoint's code from a copy in its cache.

    Args:
        file: as Python knows it.
        folder: the model as the recipe names it; no folder for one of the hub, whose copy is all there is.
    """
    own = Path(folder) / Path(file).name
    if folder and "transformers_modules" in file and own.is_file() and own.read_bytes() == Path(file).read_bytes():
        return str(own)
    return file
