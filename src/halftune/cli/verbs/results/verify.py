"""Prove that what is served is what was trained: tokens, stops, weights, rounding.

  halftune verify runs/mine --against models/mine                         an export, in transformers
  halftune verify runs/mine --against models/mine-q8_0.gguf               in llama.cpp
  halftune verify runs/mine --against http://localhost:8000 --model mine  a server with OpenAI's API
  halftune verify --reference ORG_MODEL_FOLDER --against COPY             a model trained elsewhere

Training keeps 32 prompts with the result's answers and log-probabilities in final/probes.json. Exit code 0: the same
but for rounding; 4: something differs, and the table says what, by which cause, and its remedy.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from halftune.config.facts.folder import read_json
from halftune.core import log
from halftune.core.errors import ConfigError
from halftune.core.optional import UNUSED, quick_imports

if TYPE_CHECKING:
    from halftune.verify.reference import Reference
    from halftune.verify.report import Report
    from halftune.verify.targets import Target

DIFFERS = 4  # exit code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune verify``."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN_DIR_OR_CONFIG", help="a run folder, or the YAML file of a finished run"
    )
    parser.add_argument("--reference", metavar="DIR", help="instead of a run: a model or adapter trained elsewhere")
    parser.add_argument(
        "--against", metavar="TARGET", required=True, help="a folder, a .gguf file, or the address of a server"
    )
    parser.add_argument("--model", metavar="NAME", default="", help="the model's name on the server")
    parser.add_argument(
        "--api-key-env", metavar="VARIABLE", default="OPENAI_API_KEY", help="variable that holds the server's key"
    )
    parser.add_argument("--base", metavar="MODEL", default="", help="folder of the base model, if it has moved")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Find the result without torch, then compare."""
    log.configure()
    if (args.run is None) == (args.reference is None):
        what = "name a run, or a model with --reference" if args.run is None else "a run and --reference"
        remedy = "for example: halftune verify runs/mine --against models/mine"
        raise ConfigError(what, remedy=remedy, code="verify.no_reference")
    folder = _result(args.run) if args.run else _folder(args.reference)
    with quick_imports(UNUSED if _is_quantised(args.against) else ()):
        from halftune.verify.reference import open_reference
    report = _compared(open_reference(folder, args.base), args)
    if args.json:
        print(json.dumps(report.as_data(), ensure_ascii=False, indent=1))
    else:
        print(_table(report))
    return 0 if report.same else DIFFERS


def _result(given: str) -> Path:
    """The folder of a run's result, which is checked; or of an export with probes.

    Raises:
        HalftuneError: it is neither.
    """
    from halftune.model.files.result import check_written
    from halftune.model.files.target import identify
    from halftune.model.result.completed_run import open_run
    from halftune.verify.probes import PROBES

    target = identify(given, "run", "adapter", "model")
    if target.kind == "run":
        return open_run(str(target.path)).final
    if not (target.path / PROBES).is_file():
        what, remedy = f"{target.kind} without {PROBES}", f"use --reference {given}"
        raise ConfigError(what, where=given, remedy=remedy, code="verify.no_reference")
    check_written(target.path, thorough=True)
    return target.path


def _compared(reference: Reference, args: argparse.Namespace) -> Report:
    from halftune.verify.processors import compare_processors, takes_media
    from halftune.verify.report import compare

    against, weights, skipped = args.against, [], ""
    base = Path(reference.base) if reference.base else reference.folder
    own = next((one for one in (reference.folder, base) if takes_media(one)), None)
    target: Target
    if against.startswith(("http://", "https://")):
        from halftune.verify.targets.server import ServerTarget

        target = ServerTarget(against, args.model, args.api_key_env)
    elif (path := _folder(against)).suffix == ".gguf" and path.is_file():
        from halftune.verify.targets.gguf import GgufTarget

        target = GgufTarget(path, reference.probes)
        weights = target.settings(reference.folder, reference.base)
    else:
        from halftune.verify.targets.folder import FolderTarget
        from halftune.verify.weights import compare_weights

        target = FolderTarget(path, reference.base if args.base else "")
        weights, skipped = compare_weights(
            reference.folder, target, args.base, quantised=bool(reference.probes.weights)
        )
        weights += compare_processors(own, target.folder) if own else []
    name, tokenizer = str(reference.folder), reference.tokenizer
    return compare(reference.probes, target, tokenizer, name, weights, skipped, media=own is not None)


def _folder(given: str) -> Path:
    """The folder of a model or adapter, or a GGUF file; of a run: its result.

    Raises:
        HalftuneError: it is none of these.
    """
    from halftune.model.files.result import FINAL
    from halftune.model.files.target import identify

    target = identify(given, "run", "adapter", "model", "gguf")
    return target.path / FINAL if target.kind == "run" else target.path


def _is_quantised(against: str) -> bool:
    folder = Path(os.path.expanduser(against))
    return (folder / "config.json").is_file() and "quantization_config" in read_json(folder / "config.json")


def _table(report: Report) -> str:
    rows = [("reference", f"{report.reference} ({report.probes} probes)"), ("target", report.target), *report.lines]
    for one in report.findings:
        rows.append((one.code, one.what))
        rows += [("  cause", one.cause)] if one.cause else []
        rows += [("  source", one.source)] if one.source else []
        rows += [("  remedy", one.remedy)] if one.remedy else []
    rows.append(("verdict", report.verdict))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
