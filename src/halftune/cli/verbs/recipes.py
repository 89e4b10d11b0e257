"""List the recipes that come with halftune, or copy one.

halftune recipes                                   all recipes
halftune recipes --memory 24 --method dpo          those for a GPU of 24 GB that train by DPO
halftune recipes copy quickstart.yaml              copy one, with the Python files that it names, into this folder
halftune recipes copy quickstart.yaml mine.yaml    under another name

`halftune train --config NAME` also finds a recipe that was not copied. Memory is what the plan expects at least per
device, with checkpointing. Exit codes: 0 done; 2 no such recipe or method, or the file exists already.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from difflib import get_close_matches
from pathlib import Path

from halftune.config.recipes import Recipe, beside, described, named, recipes
from halftune.config.sections.method import METHOD_SECTIONS

REFUSED = 2
_HEAD = ("recipe", "model", "method", "adapter", "hardware", "GiB from", "run on")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune recipes``."""
    parser.add_argument("action", metavar="copy NAME [FILE]", nargs="*", help="copy a recipe; default: list them")
    parser.add_argument("--memory", metavar="GIB", type=_gib, help="only recipes that need no more, per device")
    parser.add_argument("--method", choices=tuple(METHOD_SECTIONS), help="only this method")
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


def _gib(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("expected a number of GiB above 0")
    return value


def _table(found: list[Recipe]) -> str:
    if not found:
        return "no recipe matches"
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
    if action != "copy" or not name or more:
        return _refused("expected: halftune recipes, or halftune recipes copy NAME [FILE]")
    if (source := named(name)) is None:
        near = get_close_matches(Path(name).stem, [path.stem for path in recipes().values()], n=3)
        return _refused(f"there is no recipe {name} · {', '.join(near) or 'halftune recipes lists them'}")
    into = Path(target or source.name)
    try:
        if into.is_dir() or target.endswith("/"):
            into /= source.name
        pairs = [(source, into), *((file, into.parent / file.name) for file in beside(source))]
        if taken := [str(new) for old, new in pairs if new.exists() and new.read_bytes() != old.read_bytes()]:
            return _refused(f"{', '.join(taken)} exists already · name another file")
        for old, new in pairs:
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(old, new)
    except OSError as error:
        return _refused(f"{into} cannot be written: {error.strerror or error}")
    print(f"copied {', '.join(str(new) for _, new in pairs)}\ntrain with: halftune train --config {into}")
    return 0


def _refused(what: str) -> int:
    print(f"halftune recipes: {what}", file=sys.stderr)
    return REFUSED
