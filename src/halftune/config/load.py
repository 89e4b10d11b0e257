"""Loads a recipe: YAML and command line → a checked, frozen configuration, or every problem at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from halftune.config.reading.foreign import recognise
from halftune.config.reading.overrides import apply_overrides
from halftune.config.reading.shorthand import expand
from halftune.config.reading.spellings import translate_spellings
from halftune.config.reading.yaml_source import Tree, parse, read_text
from halftune.config.rules.depends import make_absolute, outputs_of_dependencies
from halftune.config.rules.finding import Context
from halftune.config.rules.keys import check
from halftune.config.run import RunConfig
from halftune.config.shape import Path as Key
from halftune.config.shape import child, dotted
from halftune.config.shipped import find
from halftune.config.validate import validate
from halftune.core.errors import ConfigError, HalftuneError

DEFAULT = "default"
MAX_PROBLEMS = 60
PATHS_IN_MODEL = ("name_or_path", "tokenizer", "chat_template")
PATHS_IN_TRAINING = ("output_dir", "resume")


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and where it came from.

    Attributes:
        run: the configuration.
        path: the YAML file.
        text: its content as the user wrote it.
        origins: dotted key of every value → ``file:line``, ``command line`` or ``default``.
    """

    run: RunConfig
    path: Path
    text: str
    origins: dict[str, str]


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, look_at_files: bool = True
) -> LoadedConfig:
    """Loads a recipe and checks it whole. No torch is imported.

    Relative paths under ``data`` and ``model`` are looked for in the working directory and then beside the YAML file;
    ``depends_on`` only beside the YAML file. ``~`` is written out in all of them, here and nowhere else.

    Args:
        path: the YAML file; where there is none, the shipped recipe of that name (``quickstart.yaml``,
            ``configs/quickstart.yaml``).
        overrides: ``training.learning_rate=1e-4`` …; they win over the file.
        look_at_files: whether data, model folders and packages that the recipe names must be there now. False to
            look at a run that is over.

    Raises:
        ConfigError: carries every problem found, each with its place.
    """
    file = find(Path(path))
    draft = read_draft(file, read_text(file), overrides, look_at_files=look_at_files)
    run = draft.run
    if draft.problems or run is None:
        raise ConfigError(_first(list(draft.problems), draft.tree.label))
    origins = {dotted(key): _origin(draft.tree, key) for key in _leaves(run)}
    return LoadedConfig(run, file, draft.text, origins)


@dataclass(frozen=True)
class Draft:
    """A recipe as far as it can be understood, with everything that is wrong with it.

    Attributes:
        text: as it was written.
        tree: its values and their places, short forms written out.
        run: the configuration, with defaults and placeholders at ``broken``; None where not even that is possible.
        problems: in the order of the lines.
        broken: the keys whose values could not be read.
    """

    text: str
    tree: Tree
    run: RunConfig | None
    problems: tuple[HalftuneError, ...]
    broken: frozenset[Key]


def read_draft(file: Path, text: str, overrides: Sequence[str] = (), *, look_at_files: bool = True) -> Draft:
    """What ``load_config`` reads, for a text that need not be finished or written to ``file`` yet.

    Raises:
        ConfigError: the text is no recipe at all: not one YAML mapping, or another framework's.
    """
    tree = parse(text, str(file))
    if (framework := recognise(tree.values)) is not None:
        remedy = f"halftune convert {file} -o {file.stem}_halftune.yaml"
        raise ConfigError(f"looks like a config of {framework}, not of halftune", where=str(file), remedy=remedy)
    expand(tree)
    apply_overrides(tree, overrides)
    expand(tree)
    broken = translate_spellings(tree)
    _write_home_out(tree)
    _find_beside(tree, file.parent)
    make_absolute(tree, file.parent)
    run, problems, more = validate(tree)
    problems = tree.problems + problems
    broken |= more
    if run is not None:
        problems += _rules(run, tree, file, broken, look_at_files)
    return Draft(text, tree, run, tuple(sorted(problems, key=_line)), frozenset(broken))


def load_run(
    folder: str | os.PathLike[str], overrides: Sequence[str] = (), *, look_at_files: bool = True
) -> LoadedConfig:
    """Loads the configuration that a run folder holds.

    Raises:
        ConfigError: it is no run folder, or its configuration is not valid here (any more).
    """
    resolved = Path(folder) / "resolved.yaml"
    if not resolved.is_file():
        what = "is no run folder: it has no resolved.yaml" if Path(folder).is_dir() else "no such run folder"
        raise ConfigError(what, where=str(folder), remedy="a run folder is what training.output_dir named")
    loaded = load_config(resolved, overrides, look_at_files=look_at_files)
    written = Path(folder) / "config.yaml"
    text = read_text(written) if written.is_file() else loaded.text
    return LoadedConfig(loaded.run, loaded.path, text, loaded.origins)


def _rules(run: RunConfig, tree: Tree, file: Path, broken: set[Key], look_at_files: bool) -> list[HalftuneError]:
    outputs, problems = outputs_of_dependencies(tree, file)
    context = Context(file, outputs, look_at_files)
    found = [tree.problem(finding.key, finding.what, finding.remedy) for finding in check(run, context, broken)]
    return problems + found


def _find_beside(tree: Tree, folder: Path) -> None:
    """A relative path that exists beside the YAML and not in the working directory becomes absolute."""
    for holder, key in _inputs(tree):
        name = holder[key]
        beside = os.path.abspath(folder / name)
        if not os.path.isabs(name) and not os.path.exists(name) and os.path.exists(beside):
            holder[key] = beside


def _write_home_out(tree: Tree) -> None:
    """``~`` and ``~user`` become folders, as a shell would have written them."""
    training = child(tree.values, "training")
    for holder, key in (*_inputs(tree), *_paths((training, key) for key in PATHS_IN_TRAINING)):
        holder[key] = os.path.expanduser(holder[key])


def _inputs(tree: Tree) -> Iterator[tuple[Any, str]]:
    """Where the tree holds the paths of what is read, as (section, key)."""
    data, model = child(tree.values, "data"), child(tree.values, "model")
    yield from _paths((model, key) for key in PATHS_IN_MODEL)
    for part in ("train", "eval"):
        sources = child(data, part)
        yield from _paths((source, "path") for source in (sources if isinstance(sources, list) else ()))


def _paths(holders: Iterable[tuple[Any, str]]) -> Iterator[tuple[Any, str]]:
    """Those that can be a path, whatever else may be wrong with the recipe."""
    for holder, key in holders:
        name = child(holder, key)
        if isinstance(name, str) and name and "\0" not in name:
            yield holder, key


def _first(problems: list[HalftuneError], label: str) -> list[HalftuneError]:
    """No more problems than a screen holds."""
    more = len(problems) - MAX_PROBLEMS
    if more <= 0:
        return problems
    return [*problems[:MAX_PROBLEMS], HalftuneError(f"{more} more problems", where=label, remedy="correct these first")]


def _line(problem: HalftuneError) -> tuple[int, str]:
    """Problems of the file in the order of its lines, then those of the command line."""
    found = re.search(r":(\d+)$", problem.where)
    return (int(found[1]), "") if found else (1 << 30, problem.where)


def _leaves(section: BaseModel, path: Key = ()) -> Iterator[Key]:
    """The path of every value; list entries that are sections are gone into."""
    for name in type(section).model_fields:
        value = section.__dict__[name]
        if isinstance(value, BaseModel):
            yield from _leaves(value, (*path, name))
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                yield from _leaves(item, (*path, name, index))
        else:
            yield (*path, name)


def _origin(tree: Tree, key: Key) -> str:
    value: Any = tree.values
    for part in key:
        if isinstance(value, dict) and part not in value:
            return DEFAULT
        value = child(value, part)
    return tree.place(key).origin
