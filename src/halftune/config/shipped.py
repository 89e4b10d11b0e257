"""The recipes shipped with halftune, found by name in any working directory."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

FOLDER = "configs"


def recipes() -> dict[str, Path]:
    """Return every shipped recipe: its name, such as ``quickstart.yaml``, and its file."""
    package = Path(str(files("halftune")))
    folder = package / FOLDER  # in an installed wheel
    if not folder.is_dir() and package.parent.name == "src":
        folder = package.parent.parent / FOLDER  # in a checkout
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find(path: Path) -> Path:
    """Return the file if it exists, else the shipped recipe named ``NAME`` or ``configs/NAME``, if any."""
    if os.path.exists(path):
        return path
    return recipes().get(path.as_posix().removeprefix(f"{FOLDER}/"), path)


def listed() -> str:
    """Return the names of all shipped recipes, comma-separated."""
    return ", ".join(f"{FOLDER}/{name}" for name in recipes())
