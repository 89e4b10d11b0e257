"""Dependencies between recipes: paths, cycles, and outputs that may not exist yet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from halftune.config.reading.yaml_source import Tree, parse, read_text
from halftune.config.shape import child
from halftune.core.errors import ConfigError, HalftuneError


def make_absolute(tree: Tree, folder: Path) -> None:
    """Make the paths under ``depends_on`` absolute, so that the resolved recipe can be moved."""
    names = child(tree.values, "depends_on")
    if isinstance(names, str):
        names = tree.values["depends_on"] = [names]
    if isinstance(names, list):
        for index, name in enumerate(names):
            if isinstance(name, str) and name:
                names[index] = os.path.abspath(folder / os.path.expanduser(name))


def outputs_of_dependencies(tree: Tree, recipe: Path) -> tuple[tuple[str, ...], list[HalftuneError]]:
    """Return the run folders (absolute) of all dependencies, and the problems of the list."""
    outputs: list[str] = []
    problems: list[HalftuneError] = []
    names = child(tree.values, "depends_on")
    for index, name in enumerate(names if isinstance(names, list) else []):
        if not isinstance(name, str):
            continue
        key = ("depends_on", index)
        try:
            _follow(name, (os.path.abspath(recipe),), outputs)
        except _CycleError as circle:
            problems.append(
                tree.problem(key, f"dependency cycle: {circle}", "remove one of these", code="config.dependency_circle")
            )
        except ConfigError as error:
            first = error.problems[0]
            problems.append(tree.problem(key, f"{first.what}: {first.where}", first.remedy, code=first.code))
    return tuple(outputs), problems


class _CycleError(Exception):
    """The recipes of a cycle, as ``a.yaml → b.yaml → a.yaml``."""


def _follow(recipe: str, above: tuple[str, ...], outputs: list[str]) -> None:
    if recipe in above:
        start = above.index(recipe)
        raise _CycleError(" → ".join(os.path.basename(path) for path in (*above[start:], recipe)))
    values: Any = parse(read_text(Path(recipe)), recipe).values
    output = child(child(values, "training"), "output_dir")
    if isinstance(output, str):
        outputs.append(os.path.abspath(os.path.expanduser(output)))
    names = child(values, "depends_on")
    for name in [names] if isinstance(names, str) else names if isinstance(names, list) else []:
        if isinstance(name, str):
            _follow(
                os.path.abspath(os.path.join(os.path.dirname(recipe), os.path.expanduser(name))),
                (*above, recipe),
                outputs,
            )
