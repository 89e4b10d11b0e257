"""List the recipes that come with halftune, or copy one.

halftune recipes                                   all recipes
halftune recipes --memory 24 --method dpo          those for a GPU of 24 GB that train by DPO
halftune recipes copy quickstart.yaml              copy one, with the Python files that it names, into this folder
halftune recipes copy quickstart.yaml mine.yaml    under another name

`halftune train --config NAME` also finds a recipe that was not copied. Memory is what the plan expects per device, on
the hardware that is named. Exit codes: 0 done; 2 no such recipe, or the file exists already.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from halftune.config.recipes import Recipe, beside, described, named, recipes
from halftune.core.table import did_you_mean

REFUSED = 2
_HEAD = ("recipe", "model", "method", "adapter", "hardware", "GiB", "run on")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune recipes``."""
    parser.add_argument("action", metavar="copy NAME [FILE]", nargs="*", help="copy a recipe; default: list them")
    parser.add_argument("--memory", metavar="GIB", type=float, help="only recipes that need no more, per device")
    parser.add_argument("--method", metavar="NAME", help="only this method, such as sft, dpo or grpo")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List or copy; returns 2 for what does not exist, or exists already."""
    if args.action:
        return _copy(*args.action)
    found = [described(name, path) for name, path in recipes().items()]
    if args.memory is not None:
        found = [one for one in found if one.memory <= args.memory]
    if args.method is not None:
        found = [one for one in found if one.method == args.method]
    print(json.dumps([one.to_dict() for one in found], indent=2) if args.json else _table(found))
    return 0


def _table(found: list[Recipe]) -> str:
    rows = [_HEAD, *((*_cells(one),) for one in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(
        [*lines, "", "halftune recipes copy RECIPE copies one; halftune plan --config RECIPE shows its plan"]
    )


def _cells(one: Recipe) -> tuple[str, ...]:
    memory = f"{one.memory:.1f}" if one.memory else "-"
    return one.name, one.model, one.method, one.adapter, one.hardware, memory, one.run or "-"


def _copy(action: str, name: str = "", target: str = "", *more: str) -> int:
    known = recipes()
    if action != "copy" or not name or more:
        return _refused("expected: halftune recipes, or halftune recipes copy NAME [FILE]")
    if (source := named(name)) is None:
        near = did_you_mean(name, [*known, *(path.stem for path in known.values())])
        return _refused(f"there is no recipe {name} · {near}")
    into = Path(target or source.name)
    pairs = [(source, into), *((file, into.parent / file.name) for file in beside(source))]
    if taken := [str(new) for old, new in pairs if new.exists() and new.read_bytes() != old.read_bytes()]:
        return _refused(f"{', '.join(taken)} exists already · name another file")
    for old, new in pairs:
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(old, new)
    print(f"copied {', '.join(str(new) for _, new in pairs)}\ntrain with: halftune train --config {into}")
    return 0


def _refused(what: str) -> int:
    print(f"halftune recipes: {what}", file=sys.stderr)
    return REFUSED
