"""The config.json of published models, for plans where the hub is out of reach."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from halftune.core.packaged import read_yaml

FOLDER = "published"


def published_config(name: str) -> Path | None:
    """The config.json that halftune has of a hub model, or None.

    Args:
        name: hub id, in any case.
    """
    folder = _folders().get(name.lower())
    return None if folder is None else _root() / folder / "config.json"


def is_published(file: Path) -> bool:
    """Whether a config.json is one that came with halftune."""
    return file.parent.parent == _root()


def _root() -> Path:
    return Path(str(files("halftune.config"))) / FOLDER


@cache
def _folders() -> dict[str, str]:
    """Hub id in lower case → folder of its config.json."""
    rows = read_yaml("halftune.config", f"{FOLDER}/models.yaml")
    return {name.lower(): folder for folder, row in rows.items() for name in row["names"]}
