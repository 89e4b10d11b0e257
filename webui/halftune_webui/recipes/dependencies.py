"""Recipes that a recipe of the browser depends on: by their whole path, and whether what they make is used at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from halftune.config.reading.dependencies import outputs_of_dependencies
from halftune.config.tree import Tree, child
from halftune.core.errors import ConfigError
from halftune_webui.recipes.recipe import LABEL, outside, paths_of
from halftune_webui.recipes.yaml_edit import ABSENT, read, set_value
from halftune_webui.settings import Settings


def needless(text: str, settings: Settings) -> list[str]:
    """Recipes under ``depends_on`` whose result this one uses nowhere; of those outside the limits nothing is said."""
    try:
        values = read(text).values
    except ConfigError:
        return []
    used = [os.path.abspath(os.path.expanduser(path)) for key, path in paths_of(values) if key[0] in ("model", "data")]
    return [name for name in _names(values) if (made := _made_by(name, settings)) and not _any_below(used, made)]


def without_needless(before: str, after: str, settings: Settings) -> str:
    """The changed recipe without those that it depended on for what it has just let go of."""
    meant = needless(before, settings)
    for name in needless(after, settings):
        if name not in meant:
            names = _names(read(after).values)
            left = [other for other in names if other != name]
            after = set_value(after, ("depends_on",), left or ABSENT)
    return after


def _names(values: Any) -> list[str]:
    names = child(values, "depends_on")
    return [name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str) and name]


def _made_by(name: str, settings: Settings) -> tuple[str, ...]:
    """Run folders of a recipe and of those below it; none where that must not, or cannot, be read."""
    tree, here = Tree(LABEL, {"depends_on": [name]}), Path.cwd()
    if list(outside(tree, settings, here, here)):
        return ()
    outputs, problems = outputs_of_dependencies(
        Tree(LABEL, {"depends_on": [os.path.abspath(os.path.expanduser(name))]}), here / LABEL
    )
    return () if problems else outputs


def _any_below(paths: list[str], folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder}{os.sep}") for path in paths for folder in folders)
