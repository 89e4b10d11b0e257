"""The recipes that a recipe depends on, and their run folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halftune.config.reading.yaml_source import parse, read_text
from halftune.config.shape import expand
from halftune.config.tree import Tree, child
from halftune.core.errors import ConfigError, HalftuneError


def outputs_of_dependencies(tree: Tree, recipe: Path) -> tuple[tuple[str, ...], list[HalftuneError]]:
    """Return the run folders (absolute) of all dependencies, and the problems of the list."""
    outputs: list[str] = []
    problems: list[HalftuneError] = []
    for index, name in _names(tree):
        key = ("depends_on", index)
        try:
            _follow(name, (os.path.abspath(recipe),), outputs)
        except ConfigError as error:
            first = error.problems[0]
            problems.append(tree.problem(key, f"{first.what}: {first.where}", first.remedy, code=first.code))
    return tuple(outputs), problems


def trained_by_dependency(tree: Tree, path: str) -> dict[str, Any] | None:
    """Return the values of the dependency whose run folder holds ``path``; None if there is no such recipe."""
    for _, name in _names(tree):
        try:
            other, output = _read(name)
        except ConfigError:  # reported with the other problems of depends_on
            continue
        if output and Path(path).absolute().is_relative_to(output):
            return other.values
    return None


def _follow(recipe: str, above: tuple[str, ...], outputs: list[str]) -> None:
    if recipe in above:
        start = above.index(recipe)
        circle = " → ".join(os.path.basename(path) for path in (*above[start:], recipe))
        remedy = "remove one of these"
        raise ConfigError("dependency cycle", where=circle, remedy=remedy, code="config.dependency_circle")
    tree, output = _read(recipe)
    outputs += [output] if output else []
    for _, name in _names(tree):
        _follow(name, (*above, recipe), outputs)


def _read(recipe: str) -> tuple[Tree, str]:
    """A recipe without short forms, and its run folder; empty if it names none."""
    tree = parse(read_text(Path(recipe)), recipe)
    expand(tree, Path(recipe).parent)
    output = child(tree.values, "training", "output_dir")
    return tree, os.path.abspath(output) if isinstance(output, str) else ""


def _names(tree: Tree) -> Iterator[tuple[int, str]]:
    names = tree.values.get("depends_on")
    for index, name in enumerate(names if isinstance(names, list) else ()):
        if isinstance(name, str):
            yield index, name
