"""What the web UI knows about a recipe: its values, what is wrong with it, and whether it keeps within the limits."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halftune.config.load import Draft, LoadedConfig, read_draft
from halftune.config.reading.yaml_source import MAX_BYTES, parse, read_text
from halftune.config.recipes import recipes
from halftune.config.tree import KeyPath, KeyProblem, Tree, child
from halftune.config.validate import validate
from halftune.core.errors import ConfigError, HalftuneError
from halftune_webui.paths import OutsideError, check_links, inside
from halftune_webui.recipes.yaml_edit import read, set_value
from halftune_webui.settings import Settings

LABEL = "recipe.yaml"
"""The name under which a recipe of the browser appears in messages; relative paths start in the working directory."""

SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16})\b"
    r"|\b(AIza[\w-]{35}|xox[abprs]-[\w-]{10,})|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|://[^/\s:@]+:[^/\s@]+@"
    r"|\bwandb_v\d+_\w{20,}|^(?!.*(?:revision|commit)).*\b[0-9a-f]{40}\b"  # of Weights & Biases
)


@dataclass(frozen=True)
class Examined:
    """A recipe as the browser sent it.

    Attributes:
        text: what was sent.
        values: its values, short forms written out; None where it is no YAML mapping.
        problems: all of them, in the words of the command line; empty where the recipe may be started.
        loaded: the configuration, also where problems elsewhere leave it usable for a plan; None where they do not.
        secret: whether it holds what looks like an access token; such a text must not be kept anywhere.
    """

    text: str
    values: dict[str, Any] | None
    problems: tuple[HalftuneError, ...]
    loaded: LoadedConfig | None
    secret: bool = False

    @property
    def runnable(self) -> str:
        """The text for a file in any folder: the recipes that it depends on are named by their whole path."""
        return with_absolute_dependencies(self.text, Path.cwd())


def examine(text: str, settings: Settings) -> Examined:
    """Reads a recipe of the browser and checks it as ``halftune train`` would, and against the web UI's limits.

    Files are looked at only where every path of the recipe keeps within the roots.
    """
    if len(text.encode()) > MAX_BYTES:
        problem = ConfigError(
            f"has more than {MAX_BYTES:,} bytes, too many for a configuration", where=LABEL, code="config.too_large"
        )
        return Examined(text, None, (problem,), None)
    secrets = tuple(_secrets(text))
    try:
        values = read(text, LABEL).values
        tree = parse(text, LABEL)
        limits = list(outside(tree, settings, Path.cwd(), Path.cwd()))
        draft = _unseen(text) if limits else read_draft(Path(LABEL), text)
    except ConfigError as error:
        return Examined(text, _values(text), (*secrets, *error.problems), None, bool(secrets))
    problems = (*secrets, *limits, *draft.problems)
    loaded = None
    if draft.run is not None and not limits and not any(path[:2] in _NEEDED for path in draft.broken):
        loaded = LoadedConfig(draft.run, Path(LABEL), text, {})
    return Examined(text, values, problems, loaded, bool(secrets))


# Where these are wrong there is nothing to plan.
_NEEDED: tuple[KeyPath, ...] = (("model",), ("model", "name_or_path"), ("method", "teacher"), ("depends_on",))


def _values(text: str) -> dict[str, Any] | None:
    try:
        return read(text, LABEL).values
    except ConfigError:
        return None


def _unseen(text: str) -> Draft:
    """The recipe without a look at any file."""
    tree = read(text, LABEL)
    run, problems, broken = validate(tree)
    return Draft(text, tree, run, (*tree.problems, *problems), frozenset(broken))


def _secrets(text: str) -> Iterator[HalftuneError]:
    for number, line in enumerate(text.splitlines(), 1):
        if SECRET.search(line):
            what = "holds what looks like a password or an access token, and a recipe is kept with its run"
            remedy = "remove it, and set it in the environment before the web UI starts (HF_TOKEN, WANDB_API_KEY)"
            yield HalftuneError(what, where=f"{LABEL}:{number}", remedy=remedy, code="webui.secret_in_recipe")


def outside(
    tree: Tree, settings: Settings, start: Path, folder: Path, seen: tuple[Path, ...] = ()
) -> Iterator[KeyProblem]:
    """What of a recipe, and of those it depends on, leaves the web UI's limits.

    Args:
        tree: the recipe.
        settings: the limits.
        start: where the process that reads it works.
        folder: where the recipe lies.
        seen: recipes that depend on this one.
    """
    for key, text in paths_of(tree.values):
        try:
            _reach(settings, text, start, folder, key[0])
        except OutsideError as error:
            yield tree.problem(key, f"{text!r} {error.what}", error.remedy, code=error.code)
            continue
        if key[0] == "depends_on":
            yield from _below(tree, key, folder / os.path.expanduser(text), settings, start, seen)
    yield from () if settings.allow_remote_code else _foreign_code(tree, folder)


def _foreign_code(tree: Tree, folder: Path) -> Iterator[KeyProblem]:
    """What of a recipe would run code that does not come with halftune, or reach a server that it names."""
    for key, text in paths_of(tree.values):
        if key[-1] == "file" and not _is_shipped(folder / text):
            what, remedy = "would run this file, which this web UI does not allow", "start the web UI with"
            yield tree.problem(key, what, f"{remedy} --allow-remote-code", code="webui.remote_code_refused")
    for index, one in enumerate(_listed(child(child(tree.values, "method"), "rewards"))):
        if child(one, "run_code") is True:
            what, remedy = "would run code of the model, which this web UI does not allow", "start the web UI with"
            key = ("method", "rewards", index, "run_code")
            yield tree.problem(key, what, f"{remedy} --allow-remote-code", code="webui.remote_code_refused")
    if child(child(tree.values, "method"), "server") is not None:
        what, remedy = "would send prompts to this server, which this web UI does not allow", "start the web UI with"
        key = ("method", "server")
        yield tree.problem(key, what, f"{remedy} --allow-remote-code", code="webui.remote_code_refused")
    if child(child(tree.values, "model"), "trust_remote_code") is True:
        what = "would run code that comes with a checkpoint, which this web UI does not allow"
        yield tree.problem(
            ("model", "trust_remote_code"),
            what,
            "start the web UI with --allow-remote-code",
            code="webui.remote_code_refused",
        )


def _below(
    tree: Tree, key: KeyPath, file: Path, settings: Settings, start: Path, seen: tuple[Path, ...]
) -> Iterator[KeyProblem]:
    """The limits hold for a recipe that this one depends on, too; what else is wrong with it, the loader says."""
    path = Path(os.path.realpath(file))
    if path in seen:
        return
    try:
        inner = parse(read_text(path), file.name)
    except ConfigError:
        return
    for problem in outside(inner, settings, start, path.parent, (*seen, path)):
        yield tree.problem(key, f"{problem.where}: {problem.what}", problem.remedy, code=problem.code)


def _reach(settings: Settings, text: str, start: Path, folder: Path, section: Any) -> None:
    """Checks a path at both places where the loader looks for it: the working directory, and beside the recipe."""
    if "\0" in text:  # before any look at the disk, which takes no such name
        inside(settings.roots, text)
    beside, is_recipe = os.path.realpath(folder / os.path.expanduser(text)), section == "depends_on"
    if text.startswith("builtin:") or (section in ("depends_on", "method") and _is_shipped(beside)):
        return
    found = [] if is_recipe else [inside(settings.roots, str(start / os.path.expanduser(text)))]
    if is_recipe or os.path.exists(beside):
        found.append(inside(settings.roots, beside))
    if section in ("model", "data"):
        for path in dict.fromkeys(found):
            check_links(settings.roots, path)


def _is_shipped(path: str | Path) -> bool:
    """Whether a file lies in the folder of a recipe of ``configs/``."""
    return os.path.dirname(os.path.realpath(path)) in {
        os.path.dirname(os.path.realpath(one)) for one in recipes().values()
    }


def paths_of(values: Any) -> Iterator[tuple[KeyPath, str]]:
    """Every value that is, or may be, a path: (key, text)."""
    names = {
        "model": ("name_or_path", "tokenizer", "chat_template"),
        "adapter": ("name_or_path",),
        "data": ("media_folder",),
        "training": ("output_dir", "resume"),
    }
    found: list[tuple[KeyPath, Any]] = [
        ((section, name), child(child(values, section), name)) for section in names for name in names[section]
    ]
    for part in ("train", "eval"):
        for index, source in enumerate(_listed(child(child(values, "data"), part))):
            found.append((("data", part, index, "path"), source if isinstance(source, str) else child(source, "path")))
    method = child(values, "method")
    teacher = child(method, "teacher")
    key = ("method", "teacher") if isinstance(teacher, str) else ("method", "teacher", "name_or_path")
    found.append((key, teacher if isinstance(teacher, str) else child(teacher, "name_or_path")))
    rewards = _listed(child(method, "rewards"))
    found += [(("method", "rewards", index, "file"), child(one, "file")) for index, one in enumerate(rewards)]
    found += [(("depends_on", index), name) for index, name in enumerate(_listed(child(values, "depends_on")))]
    yield from ((key, text) for key, text in found if isinstance(text, str) and text)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def with_absolute_dependencies(text: str, folder: Path) -> str:
    """The recipe with ``depends_on`` written as whole paths, which hold wherever the text is put.

    Raises:
        ConfigError: it is no YAML mapping.
    """
    names = child(read(text).values, "depends_on")
    for index, name in enumerate(names if isinstance(names, list) else []):
        if isinstance(name, str) and name:
            whole = os.path.abspath(folder / os.path.expanduser(name))
            text = set_value(text, ("depends_on", index), whole)
    return text


def shipped(name: str) -> str:
    """The text of a recipe of ``configs/``, ready to stand anywhere.

    Raises:
        ConfigError: there is none of that name.
    """
    known = recipes()
    if name not in known:
        raise ConfigError(f"there is no recipe {name}", remedy=f"one of {', '.join(known)}", code="core.unknown_name")
    folder = known[name].parent
    text = with_absolute_dependencies(known[name].read_text(encoding="utf-8"), folder)
    for key, path in paths_of(read(text).values):
        if key[-1] == "file":
            text = set_value(text, key, os.path.abspath(folder / path))
    return text
