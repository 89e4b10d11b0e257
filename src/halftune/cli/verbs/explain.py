"""Explain an error code and its fix.

halftune explain config.unknown_key         error messages end with their code in brackets
halftune explain                            list all codes by package
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from difflib import get_close_matches
from itertools import groupby

from halftune.core.error_codes import Entry, catalogue

UNKNOWN = 2  # the exit code for a code that does not exist


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune explain``."""
    parser.add_argument("code", metavar="CODE", nargs="?", help="such as data.malformed_row; default: all codes")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of code, means and fix")


def run(args: argparse.Namespace) -> int:
    """Print one entry or all; returns 2 for an unknown code."""
    known = catalogue()
    code = (args.code or "").strip("[]")  # as it is copied from a message
    if code and code not in known:
        near = get_close_matches(code, known, n=3, cutoff=0.4)
        remedy = f"similar: {', '.join(near)}" if near else "`halftune explain` lists all codes"
        print(f"halftune explain: unknown error code {code!r} · {remedy}", file=sys.stderr)
        return UNKNOWN
    entries = [known[code]] if code else list(known.values())
    if args.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2, ensure_ascii=False))
    elif code:
        print(f"{code}\n  {entries[0].means}\n  How to fix it: {entries[0].fix}")
    else:
        print("\n".join(_listed(entries)))
    return 0


def _listed(entries: list[Entry]) -> list[str]:
    """The codes, grouped by package."""
    lines = []
    width = max(len(entry.code) for entry in entries)
    for package, group in groupby(entries, key=lambda entry: entry.code.partition(".")[0]):
        lines += ["", package] if lines else [package]
        lines += [f"  {entry.code:<{width}}  {entry.means}" for entry in group]
    return lines
