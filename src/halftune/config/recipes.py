"""The recipes that come with halftune, and what their first lines say about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from halftune.core.packaged import read_written

FOLDER = "configs"
_SAID = re.compile(r"^# (hardware|memory|run): *(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """A shipped recipe.

    Attributes:
        name: of its file below ``configs``.
        model: hub id, or builtin model.
        method: such as ``dpo``.
        adapter: such as ``lora``; ``none`` trains all weights. With ``+ nf4`` and the like if weights are quantised.
        hardware: a machine of the catalogue that it is planned for; ``cpu`` where the file names none.
        memory: GiB per device that it needs at least, planned there with or without checkpointing; 0: none is named.
        run: where it was run; empty: nowhere that the file names.
    """

    name: str
    model: str
    method: str
    adapter: str
    hardware: str
    memory: float
    run: str

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON data."""
        return asdict(self)


def recipes() -> dict[str, Path]:
    """Return every shipped recipe: its name, such as ``quickstart.yaml``, and its file."""
    package = Path(str(files("halftune")))
    folder = package / FOLDER  # in an installed wheel
    if not folder.is_dir() and package.parent.name == "src":
        folder = package.parent.parent / FOLDER  # in a checkout
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find(path: Path) -> Path:
    """Return the file if it exists, else the shipped recipe of that name, if any.

    Args:
        path: as in ``tiny/dpo.yaml``; ``configs/`` in front, the folder and ``.yaml`` may be left out.
    """
    if path.is_file():
        return path
    return named(path.as_posix()) or path


def named(name: str) -> Path | None:
    """The shipped recipe of a name as in :func:`find`, or None."""
    name = name.removeprefix(f"{FOLDER}/").removesuffix(".yaml").removesuffix(".yml") + ".yaml"
    known = recipes()
    by_file = {file.name: file for file in known.values()}
    return known.get(name) or by_file.get(name)


def described(name: str, path: Path) -> Recipe:
    """What a shipped recipe trains, and what its first lines say."""
    text = path.read_text(encoding="utf-8")
    said, tree = dict(_SAID.findall(text)), read_written(text)
    model, weights = tree["model"], tree["model"].get("quantization", "none")
    adapter = _kind(tree.get("adapter", "lora"))
    return Recipe(
        name=name,
        model=model["name_or_path"],
        method=_kind(tree.get("method", "sft")),
        adapter=adapter if weights == "none" else f"{adapter} + {weights}",
        hardware=said.get("hardware", "cpu"),
        memory=float(said.get("memory", "0").removesuffix(" GiB")),
        run=said.get("run", ""),
    )


def beside(path: Path) -> list[Path]:
    """The Python files and the recipes that a shipped recipe names as its own or to be trained first."""
    text = path.read_text(encoding="utf-8")
    first = read_written(text).get("depends_on", [])
    scripts = [file for file in sorted(path.parent.glob("*.py")) if re.search(rf"\b{re.escape(file.name)}\b", text)]
    return [*scripts, *(path.parent / name for name in ([first] if isinstance(first, str) else first))]


def _kind(section: str | Mapping[str, Any]) -> str:
    return section if isinstance(section, str) else str(section.get("type", "lora"))
