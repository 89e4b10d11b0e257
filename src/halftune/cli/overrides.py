"""The shared arguments of verbs with a configuration: ``--config``, ``key=value``, ``--set``, ``--rerun``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from halftune.config.load import LoadedConfig, load_config, load_run
from halftune.config.reading.suggest import key_of
from halftune.config.tree import DEFAULT
from halftune.core.errors import ConfigError, HalftuneError


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config YAML``, positional ``section.key=value`` and ``--set section.key=value``."""
    parser.add_argument("--config", metavar="YAML", help="the recipe")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="overrides such as training.learning_rate=1e-4"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an override, written as an option"
    )


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer ≥ 1, got {text!r}")
    return int(text)


def port(text: str) -> int:
    """Parse a TCP port; 0 selects a free one. A larger number would be taken modulo 65,536."""
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def load_from(args: argparse.Namespace) -> LoadedConfig:
    """Load the configuration: a recipe, or with ``--rerun`` the configuration of a run folder.

    Raises:
        ConfigError: neither or both are given, or the configuration is invalid.
    """
    overrides = [*args.overrides, *args.set]
    rerun = vars(args).get("rerun")  # only verbs that can repeat a run define it
    if rerun is not None and args.config is not None:
        what = "--config and --rerun are mutually exclusive"
        raise ConfigError(what, remedy="remove --config: --rerun has its own", code="cli.option_conflict")
    if rerun is not None:
        return _with_origins(load_run(rerun, overrides), args)
    if args.config is None:
        recipe = next((one for one in overrides if one.endswith((".yaml", ".yml")) and "=" not in one), None)
        remedy = f"use --config {recipe}" if recipe else "use for example --config configs/quickstart.yaml"
        raise ConfigError("no recipe given", remedy=remedy, code="cli.no_recipe")
    return _with_origins(load_config(args.config, overrides), args)


def refuse_options(unknown: Sequence[str], arguments: Sequence[str]) -> None:
    """Refuse options of other frameworks (``--learning_rate 1e-4``) and name the corresponding key.

    Args:
        unknown: the arguments that the parser does not know.
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
        problems.append(ConfigError(f"unknown option {name}", remedy=f"write {key}={value}", code="cli.unknown_option"))
    if problems:
        raise ConfigError(problems)


def _with_origins(loaded: LoadedConfig, args: argparse.Namespace) -> LoadedConfig:
    """Keep the origin of each key in ``args``, for later errors."""
    args.origins = loaded.origins
    return loaded


def place(error: HalftuneError, args: argparse.Namespace) -> None:
    """Add file and line to the place of an error whose key the user has set."""
    key, origins = error.where, vars(args).get("origins", {})
    names = (name for name in origins if name == key or name.startswith(f"{key}."))
    origin = next((origins[name] for name in names if origins[name] != DEFAULT), "")
    if key and origin and not os.path.exists(key):  # a folder may have a key's name, such as model
        error.where = f"{origin}: {key}"
