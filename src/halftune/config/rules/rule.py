"""Rules, their violations, and the context they may read besides the configuration.

The context knows what one recipe needs of another: paths, cycles, and outputs that may not exist yet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from halftune.config.reading.yaml_source import Tree, parse, read_text
from halftune.config.run import RunConfig
from halftune.config.shape import KeyPath, child
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


HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


class Violation(NamedTuple):
    """An invalid value at ``key``; ``code`` defaults to the rule's."""

    key: KeyPath
    what: str
    remedy: str
    code: str = ""


@dataclass(frozen=True)
class Context:
    """What rules may read besides the configuration.

    Attributes:
        recipe: the YAML file.
        outputs: run folders of dependencies, whose models may not exist yet.
        look_at_files: whether data files and folders must exist now.
    """

    recipe: FilePath
    outputs: tuple[str, ...] = ()
    look_at_files: bool = True

    def made_by_dependency(self, name: str) -> bool:
        """Whether this path is an output of a dependency."""
        path = os.path.abspath(name)
        return any(path == output or path.startswith(output + os.sep) for output in self.outputs)

    def is_hub_id(self, name: str) -> bool:
        """Whether a model name must be a hub id."""
        if name.startswith("builtin:") or os.path.exists(name) or self.made_by_dependency(name):
            return False
        return not looks_local(name)


def looks_local(name: str) -> bool:
    """Whether a name looks like a path: by its beginning, several slashes, or a slash at the end."""
    return name.startswith((".", "/", "~", "\\")) or name.count("/") > 1 or name.endswith("/") or "\\" in name


Check = Callable[[RunConfig, Context], Iterator[Violation]]


class Rule(NamedTuple):
    """A rule.

    Attributes:
        check: yields violations.
        code: default error code.
        reads: keys; the rule is skipped if one of them is invalid.
    """

    check: Check
    code: str
    reads: tuple[KeyPath, ...]


RULES: list[Rule] = []
"""Every rule of the imported modules."""


def rule(code: str, *keys: str) -> Callable[[Check], Check]:
    """Register a function as a rule with this code, which reads these keys."""

    def enter(check: Check) -> Check:
        RULES.append(Rule(check, code, tuple(tuple(key.split(".")) for key in keys)))
        return check

    return enter
