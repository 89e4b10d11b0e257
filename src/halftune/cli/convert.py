"""Translate LLaMA-Factory, axolotl or TRL configs into recipes, and say whether they learn the same.

halftune convert old.yaml                   print the recipe; what became of each key goes to stderr
halftune convert old.yaml -o new.yaml       write it, and check it
halftune convert old.yaml --accept load_in_4bit -o new.yaml     although the base is not quantised here
halftune convert examples/*.yaml            one line for each: same, approximate or refused, and the keys

Exit code 0: same or approximate. 4: refused, as something else would be learned; nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from halftune.config.convert.convert import CONVERTERS, Converted, convert_file, report
from halftune.config.load import load_config
from halftune.core.atomic import first_aid, is_full, write_text
from halftune.core.errors import ConfigError, TrainingError

REFUSED = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``halftune convert``."""
    parser.add_argument("config", metavar="YAML", nargs="+", help="the other framework's config; of several, a table")
    parser.add_argument("-o", "--output", metavar="YAML", help="where to write the recipe; printed without it")
    parser.add_argument("--from", dest="framework", choices=sorted(CONVERTERS), help="whose config it is, if unclear")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument(
        "--accept", action="append", default=[], metavar="KEY", help="convert although this key of it is refused"
    )
    parser.add_argument("--json", action="store_true", help="print status, recipe and what became of each key as JSON")


def run(args: argparse.Namespace) -> int:
    """Converts, reports and, for a written file, validates."""
    if len(args.config) > 1:
        return _table(args)
    path = Path(args.config[0])
    converted = convert_file(path, args.framework, args.accept)
    if strange := [key for key in args.accept if key not in {note.key for note in converted.notes}]:
        raise ConfigError(f"the config has no key {strange[0]}", where="--accept", remedy="accept a key that it has")
    refused = converted.status == "refused"
    if args.output is not None and not refused:
        _write(Path(args.output), converted.yaml, force=args.force)
    if args.json:
        print(json.dumps(_as_dict(path, converted), indent=2, ensure_ascii=False))
        return REFUSED if refused else 0
    print(report(converted), file=sys.stderr if args.output is None else sys.stdout)
    if refused:
        print(f"halftune convert: {_refusal(path, converted)}", file=sys.stderr)
        return REFUSED
    if args.output is None:
        print(converted.yaml, end="")
        return 0
    return _check(args.output, converted)


def _check(output: str, converted: Converted) -> int:
    try:
        load_config(output)
    except ConfigError as error:
        print(f"\n{output} is written. Before it can run:\n{error}")
        return error.exit_code
    listed = f": {len(converted.of('changed'))} keys are listed above" if converted.status == "approximate" else ""
    print(f"\n{output} is written and valid ({converted.status}{listed}): train --config {output}")
    return 0


def _refusal(path: Path, converted: Converted) -> str:
    keys = [note.key for note in converted.of("refused")]
    what = f"{path}: refused: {', '.join(keys)} would be lost, and something else learned"
    if not converted.yaml:
        return f"{what} · {converted.of('refused')[-1].why}"
    return f"{what} · to convert it all the same: {' '.join(f'--accept {key}' for key in keys)}"


def _write(output: Path, text: str, *, force: bool) -> None:
    if output.exists() and not force:
        raise ConfigError("exists already", where=str(output), remedy="choose another name, or --force")
    try:
        write_text(output, text)
    except OSError as error:
        kind = TrainingError if is_full(error) else ConfigError
        raise kind(f"cannot be written: {error.strerror}", where=str(output), remedy=first_aid(error)) from None


def _table(args: argparse.Namespace) -> int:
    """One line for each of several configs."""
    if args.output is not None:
        raise ConfigError("--output takes one config", where="--output", remedy="convert them one by one")
    rows, counts = [], Counter[str]()
    for name in args.config:
        try:
            converted = convert_file(Path(name), args.framework, args.accept)
        except ConfigError as error:
            rows.append({"file": name, "status": "unreadable", "error": str(error)})
        else:
            rows.append(_as_dict(Path(name), converted))
        counts[rows[-1]["status"]] += 1
        if not args.json:
            keys = [key["key"] for key in rows[-1].get("keys", ()) if key["kind"] in ("refused", "changed")]
            print(f"{rows[-1]['status']:<11} {name}  {', '.join(keys)}")
    if args.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return REFUSED if counts["refused"] else ConfigError.exit_code if counts["unreadable"] else 0


def _as_dict(path: Path, converted: Converted) -> dict[str, Any]:
    return {
        "file": str(path),
        "framework": converted.framework,
        "status": converted.status,
        "recipe": converted.values,
        "keys": [vars(note) for note in converted.notes],
    }
