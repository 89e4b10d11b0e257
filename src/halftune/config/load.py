"""Loads a recipe from YAML and command line into a validated, frozen configuration, or reports every problem."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel

from halftune.config.facts.adapter import adopt
from halftune.config.reading.dependencies import outputs_of_dependencies
from halftune.config.reading.foreign import recognise
from halftune.config.reading.overrides import apply_overrides, translate_spellings
from halftune.config.reading.yaml_source import parse, read_text
from halftune.config.recipes import find
from halftune.config.rules.check import check
from halftune.config.rules.rule import Context
from halftune.config.run import RunConfig
from halftune.config.shape import expand
from halftune.config.tree import KeyPath, Tree, dotted
from halftune.config.validate import validate
from halftune.core.errors import ConfigError, HalftuneError

MAX_PROBLEMS = 60


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with the origin of each value.

    Attributes:
        run: the configuration.
        path: the YAML file.
        text: its original content.
        origins: dotted key of every value → ``file:line``, ``command line`` or ``default``.
    """

    run: RunConfig
    path: Path
    text: str
    origins: dict[str, str]


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, look_at_files: bool = True
) -> LoadedConfig:
    """Load and validate a recipe, without importing torch.

    Relative paths under ``data`` and ``model`` are searched in the working directory, then in the YAML file's folder;
    ``depends_on`` only in the YAML file's folder. ``~`` is expanded in all of them.

    Args:
        path: the YAML file; if it does not exist, the shipped recipe of that name (``quickstart.yaml``,
            ``configs/quickstart.yaml``).
        overrides: ``training.learning_rate=1e-4`` …, which override the file.
        look_at_files: whether data, model folders and packages of the recipe must exist. False for finished runs.

    Raises:
        ConfigError: contains every problem found, each with its place.
    """
    file = find(Path(path))
    text = read_text(file)
    draft = read_draft(file, text, overrides, look_at_files=look_at_files, download=True)
    run = draft.run
    if draft.problems or run is None:
        raise ConfigError(_first(list(draft.problems), draft.tree.label))
    return LoadedConfig(run, file, text, dict(_origins(run, draft.tree)))


@dataclass(frozen=True)
class Draft:
    """A recipe as far as it can be parsed, with all its problems.

    Attributes:
        text: its original content.
        tree: its values and their places, with short forms expanded.
        run: the configuration, with defaults and placeholders at ``broken``; None if that is not possible.
        problems: ordered by line.
        broken: the keys with invalid values.
    """

    text: str
    tree: Tree
    run: RunConfig | None
    problems: tuple[HalftuneError, ...]
    broken: frozenset[KeyPath]


def read_draft(
    file: Path, text: str, overrides: Sequence[str] = (), *, look_at_files: bool = True, download: bool = False
) -> Draft:
    """Read a recipe's text, which may be incomplete and need not be saved in ``file``.

    The config of an adapter that training starts from is read, and with ``download`` the hub is asked for it.

    Raises:
        ConfigError: the text is not a YAML mapping, or another framework's config.
    """
    tree = parse(text, str(file))
    if (framework := recognise(tree.values)) is not None:
        remedy = f"run halftune convert {file} -o {file.stem}_halftune.yaml"
        what = f"expected a halftune recipe, got a config of {framework}"
        raise ConfigError(what, where=str(file), remedy=remedy, code="config.foreign_config")
    apply_overrides(tree, overrides)
    expand(tree, file.parent)
    broken = translate_spellings(tree)
    if look_at_files:
        adopt(tree, download=download)
    run, problems, more = validate(tree)
    problems = tree.problems + problems
    broken |= more
    if run is not None:
        outputs, circles = outputs_of_dependencies(tree, file)
        found = check(run, Context(file, outputs, look_at_files), broken)
        problems += circles + [tree.problem(one.key, one.what, one.remedy, code=one.code) for one in found]
    return Draft(text, tree, run, tuple(sorted(problems, key=_line)), frozenset(broken))


def load_run(
    folder: str | os.PathLike[str], overrides: Sequence[str] = (), *, look_at_files: bool = True
) -> LoadedConfig:
    """Load the configuration of a run folder.

    Raises:
        ConfigError: not a run folder, or its configuration is not valid here.
    """
    resolved = Path(folder) / "resolved.yaml"
    if not resolved.is_file():
        what = "not a run folder (no resolved.yaml)" if Path(folder).is_dir() else "no such run folder"
        remedy = "use the training.output_dir of a run"
        raise ConfigError(what, where=str(folder), remedy=remedy, code="config.not_a_run_folder")
    loaded = load_config(resolved, overrides, look_at_files=look_at_files)
    written = Path(folder) / "config.yaml"
    return replace(loaded, text=read_text(written)) if written.is_file() else loaded


def _first(problems: list[HalftuneError], label: str) -> list[HalftuneError]:
    """The first ``MAX_PROBLEMS`` problems."""
    more = len(problems) - MAX_PROBLEMS
    if more <= 0:
        return problems
    return [
        *problems[:MAX_PROBLEMS],
        HalftuneError(f"{more} more problems", where=label, remedy="fix these first", code="config.more_problems"),
    ]


def _line(problem: HalftuneError) -> tuple[int, str]:
    """Sort key: problems of the file by line, then those of the command line."""
    found = re.search(r":(\d+)$", problem.where)
    return (int(found[1]), "") if found else (1 << 30, problem.where)


def _origins(section: BaseModel, tree: Tree, path: KeyPath = ()) -> Iterator[tuple[str, str]]:
    """The dotted key and the origin of every value, including those in sections in lists."""
    for name in type(section).model_fields:
        value, key = section.__dict__[name], (*path, name)
        if isinstance(value, BaseModel):
            yield from _origins(value, tree, key)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                yield from _origins(item, tree, (*key, index))
        else:
            yield dotted(key), tree.origin(key)
