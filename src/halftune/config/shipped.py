"""The recipes that halftune brings, found by name in every working directory."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

FOLDER = "configs"


def recipes() -> dict[str, Path]:
    """Every shipped recipe: its name, as ``quickstart.yaml``, and its file."""
    package = Path(str(files("halftune")))
    folder = package / FOLDER  # in an installed wheel
    if not folder.is_dir() and package.parent.name == "src":
        folder = package.parent.parent / FOLDER  # in a checkout
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find(path: Path) -> Path:
    """The file itself; where there is none, the shipped recipe that ``NAME`` or ``configs/NAME`` means, if any."""
    if os.path.exists(path):
        return path
    return recipes().get(path.as_posix().removeprefix(f"{FOLDER}/"), path)


def listed() -> str:
    """The names of all shipped recipes, as a user writes them."""
    return ", ".join(f"{FOLDER}/{name}" for name in recipes())
