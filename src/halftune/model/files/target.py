"""What a path is that is given to a verb, by what lies in it: a run, a checkpoint, an adapter, a model, a GGUF file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halftune.config.load import load_config
from halftune.config.recipes import named
from halftune.core.errors import ModelError
from halftune.core.manifest import MARKER
from halftune.model.files.result import FINAL

Kind = Literal["run", "checkpoint", "adapter", "model", "gguf", "name"]
RESOLVED, ADAPTER, MODEL = "resolved.yaml", "adapter_config.json", "config.json"  # each makes its folder what it is
WRITTEN = "config.yaml"  # the recipe as it was written
STATE, TRAINABLE, OPTIMIZER = "state.json", "trainable.safetensors", "optimizer.safetensors"  # of a checkpoint

_MOST_NAMES = 6  # in an error
_CALLED: dict[Kind, str] = {
    "run": "a run folder",
    "checkpoint": "a checkpoint",
    "adapter": "an adapter folder",
    "model": "a model folder",
    "gguf": "a GGUF file",
    "name": "no file or folder",
}


@dataclass(frozen=True)
class Target:
    """What a path or name means.

    Attributes:
        kind: ``name`` where there is no such path: of a builtin model, or on the hub.
        path: the run folder, also where its ``final`` or its recipe was given; of ``gguf`` the file; else as given.
    """

    kind: Kind
    path: Path


def identify(given: str, *accepted: Kind) -> Target:
    """Decide what a path means. Nothing is decided by its neighbours, but that a run folder's ``final`` is the run.

    Args:
        given: a path, the name of a shipped recipe, or another name.
        accepted: the kinds that the caller can read.

    Raises:
        ModelError: it is none of these; says what was found.
        HalftuneError: it is a recipe with mistakes.
    """
    found = _found(os.path.expanduser(given))
    if isinstance(found, Target) and found.kind in accepted:
        return found
    kind = found.kind if isinstance(found, Target) else None
    what = found if isinstance(found, str) else _CALLED[found.kind]
    asked = ", ".join(_CALLED[one] for one in accepted if one != "name")
    remedies = {"checkpoint": f"export it: halftune export {given} --output DIR", "name": "check the path"}
    remedy = remedies.get(str(kind), "use a run folder (training.output_dir) or the YAML file of a finished run")
    raise ModelError(f"found {what}, not one of: {asked}", where=given, remedy=remedy, code="config.not_a_run_folder")


def _found(given: str) -> Target | str:
    """What a path is; a text where it is nothing that a verb reads."""
    path = Path(given)
    if os.path.isdir(given):
        return _of_folder(path)
    if os.path.isfile(given):
        return Target("gguf", path) if path.suffix == ".gguf" else Target("run", _of_recipe(path))
    if os.path.lexists(given):
        return "neither a file nor a folder" if os.path.exists(given) else "a broken symbolic link"
    recipe = named(path.as_posix())
    return Target("name", path) if recipe is None else Target("run", _of_recipe(recipe))


def _of_folder(folder: Path) -> Target | str:
    """What a folder is, or what it contains instead."""
    if (folder / RESOLVED).is_file():
        return Target("run", folder)
    names = sorted(os.listdir(folder))
    beginnings = tuple(name.split(".")[0] for name in (TRAINABLE, OPTIMIZER))
    shards = any(name.startswith(beginnings) and name.endswith(".safetensors") for name in names)
    if shards or MARKER in names:
        return Target("checkpoint", folder)
    for final in (Path(os.path.abspath(folder)), folder.resolve()):
        if final.name == FINAL and (final.parent / RESOLVED).is_file():
            return Target("run", final.parent)
    if (folder / ADAPTER).is_file():
        return Target("adapter", folder)
    if (folder / MODEL).is_file():
        return Target("model", folder)
    if len(files := [name for name in names if name.endswith(".gguf")]) == 1:
        return Target("gguf", folder / files[0])
    shown = ", ".join(names[:_MOST_NAMES]) + (" …" if len(names) > _MOST_NAMES else "")
    return f"a folder with {shown}" if names else "an empty folder"


def _of_recipe(file: Path) -> Path:
    """The run folder of a recipe. A run's own ``resolved.yaml`` and ``config.yaml`` mean that run, wherever it is.

    Raises:
        ModelError: it has not been trained.
        ConfigError: it has mistakes.
    """
    if file.name in (RESOLVED, WRITTEN) and (file.parent / RESOLVED).is_file() and (file.parent / FINAL).is_dir():
        return file.parent
    folder = Path(load_config(file, look_at_files=False).run.training.output_dir)
    if not (folder / RESOLVED).is_file():
        what, remedy = f"this config has not been trained: no run in {folder}", f"train it first: train --config {file}"
        raise ModelError(what, where=str(file), remedy=remedy, code="model.run_unfinished")
    return folder
