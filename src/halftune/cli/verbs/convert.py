"""Convert LLaMA-Factory, axolotl or TRL configs into recipes, and report whether training is equivalent.

halftune convert old.yaml                   print the recipe; the report on each key goes to stderr
halftune convert old.yaml -o new.yaml       write and validate it
halftune convert old.yaml --accept neftune_noise_alpha -o new.yaml     convert although this key is not supported
halftune convert examples/*.yaml            one line for each: same, approximate or refused, and the keys

Exit code 0: same or approximate. 4: refused, since training would differ; nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from halftune.config.load import load_config, read_draft
from halftune.convert.convert import CONVERTERS, Converted, convert_file, report
from halftune.core.atomic import is_full, write_error_remedy, write_text
from halftune.core.errors import ConfigError, HalftuneError, TrainingError

REFUSED, REFUSAL = 4, "convert.refused"  # exit code and error code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune convert``."""
    parser.add_argument("config", metavar="YAML", nargs="+", help="the other framework's config; a table for several")
    parser.add_argument("-o", "--output", metavar="YAML", help="file for the recipe; default: print it")
    parser.add_argument("--from", dest="framework", choices=sorted(CONVERTERS), help="the framework, if ambiguous")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument(
        "--accept", action="append", default=[], metavar="KEY", help="convert although this key is refused"
    )
    parser.add_argument("--json", action="store_true", help="print status, recipe and the report on each key as JSON")


def run(args: argparse.Namespace) -> int:
    """Convert and report; validate a written file."""
    if len(args.config) > 1:
        return _table(args)
    path = Path(args.config[0])
    converted = convert_file(path, args.framework, args.accept)
    if strange := [key for key in args.accept if key not in {note.key for note in converted.notes}]:
        what = f"the config has no key {strange[0]}"
        raise ConfigError(what, where="--accept", remedy="use a key of the config", code="cli.bad_option_value")
    refused = converted.status == "refused"
    if args.output is not None and not refused:
        _write(Path(args.output), converted.yaml, force=args.force)
    if args.json:
        print(json.dumps(answer := _as_dict(path, converted), indent=2, ensure_ascii=False))
        return REFUSED if refused else ConfigError.exit_code if "problems" in answer else 0
    return _print(path, converted, args.output)


def _print(path: Path, converted: Converted, output: str | None) -> int:
    """Print the report, and the recipe where no file takes it; returns the exit code."""
    print(report(converted), file=sys.stderr if output is None else sys.stdout)
    if converted.status == "refused":
        print(f"halftune convert: {_refusal(path, converted)}", file=sys.stderr)
        return REFUSED
    if output is None:
        print(converted.yaml, end="")
        if found := _problems(converted):
            print(f"\nhalftune convert: fix before running:\n{ConfigError(found)}", file=sys.stderr)
        return ConfigError.exit_code if found else 0
    return _check(output, converted)


def _problems(converted: Converted) -> tuple[HalftuneError, ...]:
    """What makes the recipe invalid, whatever the machine and the files on it."""
    if converted.status == "refused":
        return ()
    return read_draft(Path("recipe"), converted.yaml, look_at_files=False).problems


def _check(output: str, converted: Converted) -> int:
    try:
        load_config(output)
    except ConfigError as error:
        print(f"\nwrote {output}. Fix before running:\n{error}")
        return error.exit_code
    listed = f": see the {len(converted.of('changed'))} keys above" if converted.status == "approximate" else ""
    print(f"\nwrote {output}, valid ({converted.status}{listed}): train --config {output}")
    return 0


def _refusal(path: Path, converted: Converted) -> str:
    keys = [note.key for note in converted.of("refused")]
    what = f"{path}: refused: training would differ without {', '.join(keys)}"
    if not converted.yaml:
        return f"{what} · {converted.of('refused')[-1].why} [{REFUSAL}]"
    return f"{what} · to convert anyway: {' '.join(f'--accept {key}' for key in keys)} [{REFUSAL}]"


def _write(output: Path, text: str, *, force: bool) -> None:
    if output.exists() and not force:
        raise ConfigError(
            "file exists", where=str(output), remedy="use another name or --force", code="convert.output_exists"
        )
    try:
        write_text(output, text)
    except OSError as error:
        kind = TrainingError if is_full(error) else ConfigError
        what = f"cannot be written: {error.strerror}"
        raise kind(what, code="core.cannot_write", where=str(output), remedy=write_error_remedy(error)) from None


def _table(args: argparse.Namespace) -> int:
    """Print one line for each of several configs."""
    if args.output is not None:
        what = "--output requires a single config"
        raise ConfigError(what, where="--output", remedy="convert them one by one", code="cli.option_conflict")
    rows, counts = [], Counter[str]()
    for name in args.config:
        rows.append(_row(name, args))
        counts[rows[-1]["status"]] += 1
        if not args.json:
            keys = [key["key"] for key in rows[-1].get("keys", ()) if key["kind"] in ("refused", "changed")]
            print(f"{rows[-1]['status']:<11} {name}  {', '.join(keys)}")
    if args.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return REFUSED if counts["refused"] else ConfigError.exit_code if counts["unreadable"] else 0


def _row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What became of one config of several; also of one that cannot be read."""
    try:
        return _as_dict(Path(name), convert_file(Path(name), args.framework, args.accept))
    except ConfigError as error:
        return {"file": name, "status": "unreadable", "error": str(error), "code": error.code}


def _as_dict(path: Path, converted: Converted) -> dict[str, Any]:
    problems = [str(problem) for problem in _problems(converted)]
    return {
        "file": str(path),
        "framework": converted.framework,
        "status": converted.status,
        **({"code": REFUSAL} if converted.status == "refused" else {}),
        **({"problems": problems} if problems else {}),
        "recipe": converted.values,
        "keys": [vars(note) for note in converted.notes],
    }
