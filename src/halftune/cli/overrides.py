"""The arguments that every verb with a configuration shares: ``--config``, ``key=value``, ``--set``, ``--rerun``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from halftune.config.load import DEFAULT, LoadedConfig, load_config, load_run
from halftune.config.reading.suggest import key_of
from halftune.core.errors import ConfigError, HalftuneError


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config YAML``, positional ``section.key=value`` and ``--set section.key=value``."""
    parser.add_argument("--config", metavar="YAML", help="the recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="training.learning_rate=1e-4 …; wins over it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="the same, as an option")


def load_from(args: argparse.Namespace) -> LoadedConfig:
    """The configuration that the arguments name: a recipe, or with ``--rerun`` what a run folder holds.

    Raises:
        ConfigError: none or both are named, or the configuration is wrong.
    """
    overrides = [*args.overrides, *args.set]
    rerun = vars(args).get("rerun")  # only verbs that can repeat a run define it
    if rerun is not None and args.config is not None:
        raise ConfigError("--config and --rerun exclude each other", remedy="--rerun brings its own configuration")
    if rerun is not None:
        return _noted(load_run(rerun, overrides), args)
    if args.config is None:
        recipe = next((one for one in overrides if one.endswith((".yaml", ".yml")) and "=" not in one), None)
        remedy = f"--config {recipe}" if recipe else "for example --config configs/quickstart.yaml"
        raise ConfigError("no recipe is named", remedy=remedy)
    return _noted(load_config(args.config, overrides), args)


def refuse_options(unknown: Sequence[str], arguments: Sequence[str]) -> None:
    """Says how options that other frameworks have for keys (``--learning_rate 1e-4``) are written here.

    Args:
        unknown: what the parser did not know.
        arguments: the whole command line.

    Raises:
        ConfigError: one of them is such an option.
    """
    problems = []
    for option in unknown:
        name, given, value = option.partition("=")
        key = key_of(name.lstrip("-")) if name.startswith("--") else None
        if key is None:
            continue
        if not given:
            after = arguments[arguments.index(option) + 1 :][:1]
            value = after[0] if after and not after[0].startswith("--") and "=" not in after[0] else "…"
        problems.append(ConfigError(f"unknown option {name}", remedy=f"write {key}={value}"))
    if problems:
        raise ConfigError(problems)


def _noted(loaded: LoadedConfig, args: argparse.Namespace) -> LoadedConfig:
    """Keeps in ``args`` where each key stands, for errors about one that are found later."""
    args.origins = loaded.origins
    return loaded


def place(error: HalftuneError, args: argparse.Namespace) -> None:
    """Puts file and line before the key that an error names, where the user has written one."""
    key, origins = error.where, vars(args).get("origins", {})
    names = (name for name in origins if name == key or name.startswith(f"{key}."))
    origin = next((origins[name] for name in names if origins[name] != DEFAULT), "")
    if key and origin and not os.path.exists(key):  # a folder may be called model
        error.where = f"{origin}: {key}"
