"""Certify a model type: every promise of halftune, tried on a small copy of the model's own class, without weights.

halftune certify Qwen/Qwen3-0.6B                        a hub id: only config.json, tokenizer and chat template are read
halftune certify ./my-model --hardware t4               plan formats and methods for another machine
halftune certify ./my-model --trust-remote-code         a model that brings its own code, after you have read it
halftune certify builtin:qwen2-tiny --json

Takes about a minute on a CPU. Each line has its evidence: yes, no, refused (the plan says so before a weight is read),
or note (not checked). Exit codes: 0 no line says no; 4 one does; 3 there is no such model, or it cannot be trained.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from contextlib import redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, TextIO

from halftune.config.sections.model import ModelSection
from halftune.core.optional import quick_imports
from halftune.core.processes.signals import unwound_by_signals
from halftune.hardware.catalogue import CATALOGUE, lookup

if TYPE_CHECKING:
    from halftune.certify.certificate import Certificate, Line

FAILED = 4
DEFAULT_HARDWARE = "a100"
_WIDEST = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune certify``."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id or builtin:NAME")
    parser.add_argument(
        "--hardware", metavar="NAME", default=DEFAULT_HARDWARE, help=f"machine to plan for: {', '.join(CATALOGUE)}"
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="as model.tokenizer")
    parser.add_argument("--chat-template", metavar="NAME", help="as model.chat_template")
    parser.add_argument("--revision", metavar="NAME", help="as model.revision")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own Python code")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Certify a model and print the lines as they come; returns 4 if one says no.

    Raises:
        HalftuneError: no such model or machine, or a type that halftune does not train.
    """
    hardware = lookup(args.hardware, {})
    asked = {"tokenizer": args.tokenizer, "chat_template": args.chat_template, "revision": args.revision}
    given = {name: value for name, value in asked.items() if value is not None}
    section = ModelSection(name_or_path=args.model, trust_remote_code=args.trust_remote_code, **given)
    with quick_imports():
        from halftune.certify.certify import certify

    own = sys.stdout
    with redirect_stdout(sys.stderr), unwound_by_signals():  # a model's code may print
        found = certify(section, hardware, report=(lambda line: None) if args.json else partial(_print, own))
    if args.json:
        print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
    else:
        print(_summary(found))
    return FAILED if found.failed else 0


def _print(stream: TextIO, line: Line) -> None:
    width = min(shutil.get_terminal_size((80, 24)).columns, _WIDEST)
    said = line.evidence + (f" · {line.remedy}" if line.remedy else "")
    head = f"{line.verdict:<8}{line.check:<17} "
    text = textwrap.fill(head + said, width, subsequent_indent=" " * len(head), break_on_hyphens=False)
    print(text, file=stream, flush=True)


def _summary(found: Certificate) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    head = f"\n{found.model} ({found.model_type}), planned for {found.hardware}, {versions}, {found.seconds:.0f} s"
    if not found.failed:
        return f"{head}\ncertified: no check says no"
    checks = ", ".join(dict.fromkeys(line.check for line in found.failed))
    return f"{head}\nnot certified: {checks}"
