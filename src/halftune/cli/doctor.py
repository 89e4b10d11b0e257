"""Look at this environment, and trace which line of a model promotes a tensor on its way to attention.

halftune doctor                                          the environment alone
halftune doctor --config configs/qwen_lora_bf16.yaml     and the recipe's model, without weights and without a GPU
halftune doctor --config x.yaml --hardware t4            as it would be on another machine
halftune doctor --config x.yaml --real                   on a small copy of the model, with numbers
halftune doctor --kernels                                and each operator against its reference on this machine

Without --hardware the trace is for this machine; where it has no accelerator, for an A100.
Exit codes: 0 all is well; 1 attention's contract breaks, or something here would stop a run; 2 the recipe is wrong or
cannot be honoured; 3 the model cannot be built.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halftune.cli.overrides import add_config_arguments, load_from
from halftune.core.errors import HalftuneError
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.hardware.facts import Hardware
from halftune.hardware.probe import probe

if TYPE_CHECKING:
    from halftune.doctor.environment import Finding as Checked
    from halftune.doctor.examine import Examination

UNWELL = 1
WITHOUT_GPU = "a100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``halftune doctor``."""
    add_config_arguments(parser)
    parser.add_argument("--hardware", metavar="NAME", help=f"trace for a made-up machine: {', '.join(CATALOGUE)}")
    parser.add_argument("--real", action="store_true", help="real tensors: a small copy of the model, with numbers")
    parser.add_argument("--kernels", action="store_true", help="check each operator against its reference here")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Examines, prints; leaves with 1 where something is not well.

    Raises:
        HalftuneError: the recipe or the model is wrong; with ``--json`` after what was found until then is printed.
    """
    checks: list[Checked] = []
    try:
        examination = _examine(args, checks)
    except HalftuneError as error:
        if args.json:
            print(json.dumps({**_data(checks, None), "error": _error(error)}, indent=2, ensure_ascii=False))
        raise
    if args.json:
        print(json.dumps(_data(checks, examination), indent=2, ensure_ascii=False))
    else:
        from halftune.doctor.render import render_environment, render_examination

        print(render_environment(checks))
        if examination is not None:
            print()
            print(render_examination(examination))
    unwell = any(check.status == "fail" for check in checks) or (examination is not None and examination.broken)
    return UNWELL if unwell else 0


def _examine(args: argparse.Namespace, checks: list[Checked]) -> Examination | None:
    """Adds to ``checks`` as it goes; the trace is None where no recipe is given."""
    from halftune.doctor.environment import environment

    wanted = args.config is not None or args.overrides or args.set
    loaded = load_from(args) if wanted else None
    here = probe()
    checks += environment(here, folder=Path(loaded.run.training.output_dir) if loaded is not None else Path())
    examination: Examination | None = None
    if loaded is not None:
        from halftune.doctor.recipe import diagnose

        machine, said = _machine(args.hardware, here)
        examination, more = diagnose(loaded, machine, here if args.hardware is None else None, real=args.real)
        examination = replace(examination, notes=(*examination.notes, *said))
        checks += more
    if args.kernels:
        from halftune.doctor.kernels import check_kernels

        checks += check_kernels()
    return examination


def _error(error: HalftuneError) -> dict[str, Any]:
    listed = [{"what": each.what, "where": each.where, "remedy": each.remedy} for each in error.problems]
    return {"kind": type(error).__name__, "exit_code": error.exit_code, "problems": listed}


def _machine(name: str | None, here: Hardware) -> tuple[Hardware, list[str]]:
    if name is not None:
        return lookup(name, {}), []
    if here.kind != "cpu":
        return here, []
    name = lookup(WITHOUT_GPU, {}).devices[0].name
    return lookup(WITHOUT_GPU, {}), [f"this machine has no accelerator: the trace is for {name}"]


def _data(checks: list[Checked], examination: Examination | None) -> dict[str, Any]:
    data: dict[str, Any] = {"environment": [check.to_dict() for check in checks]}
    if examination is not None:
        data["trace"] = examination.to_dict()
    return data
