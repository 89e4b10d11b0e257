"""Check the environment, and find the lines of a model that promote dtypes before attention.

halftune doctor                                          the environment only
halftune doctor --config configs/qwen_lora_bf16.yaml     also the recipe's model, without weights and without a GPU
halftune doctor --config x.yaml --hardware t4            for another machine
halftune doctor --config x.yaml --real                   run a small copy of the model with random weights
halftune doctor --kernels                                also compare each operator with its reference

Without --hardware the trace is for this machine, or for an A100 if it has no accelerator.
Exit codes: 0 no problem; 1 the model violates attention's dtype contract, or the environment would stop a run; 2 the
recipe is invalid or not supported here; 3 the model cannot be built.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halftune.cli.overrides import add_config_arguments, load_from
from halftune.core.errors import HalftuneError
from halftune.core.optional import quick_imports
from halftune.hardware import Hardware
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.hardware.probe import probe

if TYPE_CHECKING:
    from halftune.doctor.environment import Check
    from halftune.doctor.trace_model import TraceReport

FAILED = 1
WITHOUT_GPU = "a100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune doctor``."""
    add_config_arguments(parser)
    parser.add_argument("--hardware", metavar="NAME", help=f"trace for another machine: {', '.join(CATALOGUE)}")
    parser.add_argument("--real", action="store_true", help="run a small copy of the model with random weights")
    parser.add_argument("--kernels", action="store_true", help="compare each operator with its reference")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the checks and print them; returns 1 if one fails.

    Raises:
        HalftuneError: invalid recipe or model; with ``--json``, earlier results are printed first.
    """
    checks: list[Check] = []
    try:
        report = _trace(args, checks)
    except HalftuneError as error:
        if args.json:
            print(json.dumps({**_data(checks, None), "error": error.to_dict()}, indent=2, ensure_ascii=False))
            args.answered = True
        raise
    if args.json:
        print(json.dumps(_data(checks, report), indent=2, ensure_ascii=False))
    else:
        from halftune.doctor.render import render_environment, render_trace

        print(render_environment(checks))
        if report is not None:
            print()
            print(render_trace(report))
    failed = any(check.status == "fail" for check in checks) or (report is not None and report.violations)
    return FAILED if failed else 0


def _trace(args: argparse.Namespace, checks: list[Check]) -> TraceReport | None:
    """Append to ``checks`` and return the trace; None without a recipe."""
    from halftune.doctor.environment import environment

    wanted = args.config is not None or args.overrides or args.set
    loaded = load_from(args) if wanted else None
    here = probe()
    checks += environment(here, folder=Path(loaded.run.training.output_dir) if loaded is not None else Path())
    report: TraceReport | None = None
    if loaded is not None:
        with quick_imports():
            from halftune.doctor.recipe import diagnose

        machine, said = _machine(args.hardware, here)
        report, more = diagnose(loaded, machine, here if args.hardware is None else None, real=args.real)
        report = replace(report, notes=(*report.notes, *said))
        checks += more
    if args.kernels:
        with quick_imports():
            from halftune.doctor.kernels import check_kernels

        checks += check_kernels()
    return report


def _machine(name: str | None, here: Hardware) -> tuple[Hardware, list[str]]:
    if name is not None:
        return lookup(name, {}), []
    if here.kind != "cpu":
        return here, []
    name = lookup(WITHOUT_GPU, {}).devices[0].name
    return lookup(WITHOUT_GPU, {}), [f"this machine has no accelerator: tracing for {name}"]


def _data(checks: list[Check], report: TraceReport | None) -> dict[str, Any]:
    data: dict[str, Any] = {"environment": [check.to_dict() for check in checks]}
    if report is not None:
        data["trace"] = report.to_dict()
    return data
