"""Translate a LLaMA-Factory, axolotl or TRL config into a recipe.

halftune convert old.yaml                   print the recipe; what became of each key goes to stderr
halftune convert old.yaml -o new.yaml       write it, and check it
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from halftune.config.convert.convert import CONVERTERS, convert_file, report
from halftune.config.load import load_config
from halftune.core.atomic import first_aid, is_full, write_text
from halftune.core.errors import ConfigError, TrainingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``halftune convert``."""
    parser.add_argument("config", metavar="YAML", help="the other framework's config")
    parser.add_argument("-o", "--output", metavar="YAML", help="where to write the recipe; printed without it")
    parser.add_argument("--from", dest="framework", choices=sorted(CONVERTERS), help="whose config it is, if unclear")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")


def run(args: argparse.Namespace) -> int:
    """Converts, reports and, for a written file, validates."""
    converted = convert_file(Path(args.config), args.framework)
    if args.output is None:
        print(report(converted), file=sys.stderr)
        print(converted.yaml, end="")
        return 0
    output = Path(args.output)
    if output.exists() and not args.force:
        raise ConfigError("exists already", where=str(output), remedy="choose another name, or --force")
    try:
        write_text(output, converted.yaml)
    except OSError as error:
        kind = TrainingError if is_full(error) else ConfigError
        raise kind(f"cannot be written: {error.strerror}", where=str(output), remedy=first_aid(error)) from None
    print(report(converted))
    try:
        load_config(output)
    except ConfigError as error:
        print(f"\n{output} is written. Before it can run:\n{error}")
        return error.exit_code
    print(f"\n{output} is written and valid: train --config {output}")
    return 0
