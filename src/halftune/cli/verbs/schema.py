"""Print the JSON Schema of recipes, or a description of every key.

halftune schema > halftune.schema.json                    JSON Schema, for completion and validation in editors
halftune schema --yaml                                    a recipe with every key, its default and description
halftune schema --markdown > docs/reference/config.md     the reference in the documentation
"""

from __future__ import annotations

import argparse
import json

from halftune.config.render.docs import explained_yaml, markdown
from halftune.config.render.schema import json_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune schema``."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the reference of docs/reference/config.md")
    form.add_argument("--yaml", action="store_true", help="print a recipe with every key explained")


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    if args.markdown:
        print(markdown(), end="")
    elif args.yaml:
        print(explained_yaml(), end="")
    else:
        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return 0
