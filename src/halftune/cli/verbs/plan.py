"""Show every decision about a run with its reason: number formats, attention, batch, memory. Loads no model.

halftune plan --config configs/qwen_lora_bf16.yaml
halftune plan --config x.yaml --hardware t4x2         for another machine (a100+t4 for mixed devices)
halftune plan --config x.yaml --hardware a100 --with flash-attn=2.8.3
halftune plan --config x.yaml --hardware t4x2 --num-processes 1      on one of the two devices
halftune plan --config x.yaml precision=auto --json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

from halftune.bench.paper.kept import known
from halftune.cli.overrides import add_config_arguments, load_from, positive
from halftune.config.facts.model import ModelFacts
from halftune.config.recipe_facts import model_facts
from halftune.config.run import RunConfig
from halftune.core.errors import DataError, HalftuneError, ModelError, PlanError
from halftune.core.files import read_text
from halftune.hardware import Device, Hardware
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.hardware.probe import probe
from halftune.launch.command import processes, world_size
from halftune.plan import Plan, explain, resolve, to_dict
from halftune.plan.duration import Pace, duration, pace_of

# codes of errors about files that another machine may have
NOT_HERE = frozenset({"model.weights_missing", "model.hub_unreachable", "data.not_found"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune plan``."""
    add_config_arguments(parser)
    known = ", ".join(CATALOGUE)
    parser.add_argument("--hardware", metavar="NAME", help=f"plan for another machine: {known}")
    parser.add_argument(
        "--with",
        dest="packages",
        action="append",
        default=[],
        metavar="PACKAGE=VERSION",
        help="assume that this package is installed",
    )
    parser.add_argument(
        "--num-processes", type=positive, metavar="N", help="processes, one device each (default: as train)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, as in plan.json")


def run(args: argparse.Namespace) -> int:
    """Load the recipe, plan and print; exits as train would if the run does not fit or its folder is in use.

    What is not on this machine does not matter to a plan for another one, and is an error after the plan for this one.

    Raises:
        HalftuneError: the run is refused, or what it needs is not here and the hub is out of reach.
    """
    loaded = load_from(args)
    from halftune.cli.preflight import check_inputs, check_outcome  # late: imports NumPy

    hardware = _machine(args.hardware, args.packages)
    facts = model_facts(loaded)
    if args.num_processes is None:
        count = world_size(loaded.run, hardware)
    else:
        asked = loaded.run.distributed.model_copy(update={"num_processes": args.num_processes})
        count = processes(loaded.run.model_copy(update={"distributed": asked}), hardware)
    plan = resolve(loaded.run, hardware, facts, world_size=count)
    missing: HalftuneError | None = None
    try:
        check_inputs(loaded, facts, here=args.hardware is None)
    except (DataError, ModelError) as error:
        if error.code not in NOT_HERE:
            raise
        missing = error
    measured = None if args.hardware else read_pace(Path(loaded.run.training.output_dir))
    if args.json:
        print(json.dumps(to_dict(plan), indent=2, ensure_ascii=False))
        args.answered = True  # it includes whether the run fits
    else:
        print(explain(plan, footer=_time(loaded.run, plan, facts, measured, hardware.devices[0])))
    if missing is not None and args.hardware is None:
        raise missing
    if missing is not None:
        where = f"{missing.where}: " if missing.where else ""
        print(f"halftune plan: {where}{missing.what}: it cannot be trained here", file=sys.stderr)
    check_outcome(loaded, plan.memory, here=args.hardware is None)
    return 0


def read_pace(folder: Path) -> Pace | None:
    """Return the speed of an earlier run in this folder; None if there is none."""
    try:
        text = read_text(folder / "metrics.jsonl")
    except OSError:
        return None
    return pace_of(text.splitlines())


def _machine(name: str | None, packages: list[str]) -> Hardware:
    if name is None and packages:
        what = "--with requires --hardware"
        raise PlanError(what, remedy="add --hardware, or install the package", code="cli.option_conflict")
    pairs = {package: version for package, _, version in (entry.partition("=") for entry in packages)}
    if "" in pairs or not all(map(_is_version, pairs.values())):
        what = "--with expects PACKAGE=VERSION"
        raise PlanError(what, where="--with", remedy="use for example flash-attn=2.8.3", code="cli.bad_option_value")
    return probe() if name is None else lookup(name, pairs)


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _time(config: RunConfig, plan: Plan, facts: ModelFacts, measured: Pace | None, device: Device) -> list[str]:
    if measured is not None:
        return [duration(config, plan, measured)]
    if (predicted := known(config, plan, facts, device)) is not None:
        return [duration(config, plan, predicted, "predicted by bench --paper")]
    return ["Time: unknown before a first run in training.output_dir."]
