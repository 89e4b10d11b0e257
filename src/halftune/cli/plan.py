"""Show every decision about a run and its reason: number formats, attention, batch, memory. Nothing is loaded.

halftune plan --config configs/qwen_lora_bf16.yaml
halftune plan --config x.yaml --hardware t4x2         as it would be on another machine (a100+t4 for a mixed one)
halftune plan --config x.yaml --hardware a100 --with flash-attn=2.8.3
halftune plan --config x.yaml --hardware t4x2 --num-processes 1      on one of the two
halftune plan --config x.yaml precision=auto --json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from halftune.cli.facts import world_size
from halftune.cli.overrides import add_config_arguments, load_from
from halftune.cli.preflight import check_inputs
from halftune.config.facts.of_recipe import model_facts
from halftune.config.run import RunConfig
from halftune.core.errors import PlanError
from halftune.core.files import read_text
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.hardware.facts import Hardware
from halftune.hardware.probe import probe
from halftune.plan import Plan, explain, resolve, to_dict
from halftune.plan.duration import Pace, duration, pace_of
from halftune.plan.memory import check_fits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``halftune plan``."""
    add_config_arguments(parser)
    known = ", ".join(CATALOGUE)
    parser.add_argument("--hardware", metavar="NAME", help=f"a made-up machine instead of this one: {known}")
    parser.add_argument(
        "--with",
        dest="packages",
        action="append",
        default=[],
        metavar="PACKAGE=VERSION",
        help="as if it were installed",
    )
    parser.add_argument(
        "--num-processes", type=_count, metavar="N", help="processes, one device each (default: as train starts them)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, as in plan.json")


def run(args: argparse.Namespace) -> int:
    """Loads the recipe, plans, prints; leaves with 1 when the run is not expected to fit, as train does."""
    loaded = load_from(args)
    hardware = _machine(args.hardware, args.packages)
    facts = model_facts(loaded)
    plan = resolve(loaded.run, hardware, facts, world_size=args.num_processes or world_size(loaded.run, hardware))
    check_inputs(loaded, facts, here=args.hardware is None)
    pace = None if args.hardware else read_pace(Path(loaded.run.training.output_dir))
    if args.json:
        print(json.dumps(to_dict(plan), indent=2, ensure_ascii=False))
    else:
        print(explain(plan, footer=_time(loaded.run, plan, pace)))
    check_fits(plan.memory, loaded.run)
    return 0


def read_pace(folder: Path) -> Pace | None:
    """How fast an earlier run in this folder was; None where there was none."""
    try:
        text = read_text(folder / "metrics.jsonl")
    except OSError:
        return None
    return pace_of(text.splitlines())


def _machine(name: str | None, packages: list[str]) -> Hardware:
    if name is None and packages:
        raise PlanError("--with needs --hardware", remedy="this machine's packages are those that are installed")
    pairs = {package: version for package, _, version in (entry.partition("=") for entry in packages)}
    if "" in pairs.values():
        raise PlanError("--with takes PACKAGE=VERSION", where="--with", remedy="for example --with flash-attn=2.8.3")
    return probe() if name is None else lookup(name, pairs)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes")
    return int(text)


def _time(config: RunConfig, plan: Plan, pace: Pace | None) -> list[str]:
    if pace is None:
        return ["Time: known after a first run in training.output_dir."]
    return [duration(config, plan, pace)]
