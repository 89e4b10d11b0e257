"""Prove that what is served is what was trained: tokens, stops, weights, rounding.

  halftune verify runs/mine --against models/mine                         an export, in transformers
  halftune verify runs/mine --against models/mine-q8_0.gguf               in llama.cpp
  halftune verify runs/mine --against http://localhost:8000 --model mine  a server with OpenAI's API
  halftune verify --reference ORG_MODEL_FOLDER --against COPY             a model trained elsewhere

Training keeps 32 prompts with the result's answers and log-probabilities in final/probes.json. Exit code 0: the same
but for rounding; 4: something differs, and the table says what, by which cause, and its remedy; 7: not known, since
something could not be compared, and the table says what.
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

EXIT_CODES = {"same": 0, "differs": 4, "not known": 7}
_FORMATS = ("fp32", "fp16", "bf16", "q8_0", "fp8", "int8", "nf4", "q4")


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
    parser.add_argument(
        "--format", choices=_FORMATS, default="", help="in which a server computes, where it does not say"
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
    folder = _result(args.run) if args.run else Path(os.path.expanduser(args.reference))
    with quick_imports(UNUSED if _is_quantised(args.against) else ()):
        from halftune.verify.reference import open_reference
    report = _compared(open_reference(folder, args.base), args)
    if args.json:
        print(json.dumps(report.as_data(), ensure_ascii=False, indent=1))
    else:
        print(_table(report))
    return EXIT_CODES[report.answer]


def _result(target: str) -> Path:
    """The folder of a run's result, which is checked; or of an export with probes."""
    from halftune.model.files.result import check_written
    from halftune.model.result.completed_run import open_run
    from halftune.verify.probes import PROBES

    folder = Path(os.path.expanduser(target))
    if (folder / "checkpoint.json").is_file():
        what, remedy = "a checkpoint has no probes", f"halftune export {target} --output DIR, then --reference DIR"
        raise ConfigError(what, where=target, remedy=remedy, code="verify.no_reference")
    if (folder / PROBES).is_file():
        check_written(folder, thorough=True)
        return folder
    return open_run(target).final


def _compared(reference: Reference, args: argparse.Namespace) -> Report:
    from halftune.verify.exact import load_exact
    from halftune.verify.processors import takes_media
    from halftune.verify.report import Files, compare
    from halftune.verify.rounding import measure_rounding

    against = args.against
    base = Path(reference.base) if reference.base else reference.folder
    own = next((one for one in (reference.folder, base) if takes_media(one)), None)
    exact, files = load_exact(reference.folder, args.base), Files(media=own is not None)
    target: Target
    if against.startswith(("http://", "https://")):
        from halftune.verify.targets.server import ServerTarget

        target = ServerTarget(against, args.model, args.api_key_env, args.format)
    elif (file := _gguf(_existing(against))) is not None:
        from halftune.verify.targets.gguf import GgufTarget

        target = GgufTarget(file, reference.probes)
        files = Files(target.settings(reference.folder, reference.base), media=own is not None)
    else:
        from halftune.verify.folders import compare_files
        from halftune.verify.targets.folder import FolderTarget

        target = FolderTarget(_existing(against), reference.base if args.base else "")
        files = compare_files(reference, exact, target, args.base, own)
    rounding = measure_rounding(reference.probes, exact, reference.folder, args.base, target.format)
    return compare(reference, exact, target, files, rounding)


def _existing(against: str) -> Path:
    path = Path(os.path.expanduser(against))
    if not path.exists():
        remedy = "name a folder, a .gguf file, or an address that begins with http://"
        raise ConfigError("no such file or folder", where=against, remedy=remedy, code="verify.target_unusable")
    return path / "final" if (path / "resolved.yaml").is_file() else path  # of a run: its result


def _is_quantised(against: str) -> bool:
    folder = Path(os.path.expanduser(against))
    return (folder / "config.json").is_file() and "quantization_config" in read_json(folder / "config.json")


def _gguf(path: Path) -> Path | None:
    """The GGUF file that is named, or the only one of a folder without another model."""
    if path.is_dir() and not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        found = sorted(path.glob("*.gguf"))
        return found[0] if len(found) == 1 else None
    return path if path.suffix == ".gguf" else None


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
