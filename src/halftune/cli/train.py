"""Train from a YAML file.

train --config configs/quickstart.yaml
train --config x.yaml training.learning_rate=1e-4 precision=auto
train --config x.yaml --print-config        the resolved configuration and where each value came from
train --config x.yaml --profile             also record a few steps: a trace, and a table of where the time goes
train --config x.yaml distributed.num_processes=2      processes; by default one per visible device
train --rerun runs/my-run training.output_dir=runs/again
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from halftune.cli.facts import world_size
from halftune.cli.overrides import add_config_arguments, load_from
from halftune.cli.preflight import check_inputs
from halftune.config.facts.of_recipe import dependencies, model_facts
from halftune.config.load import LoadedConfig
from halftune.config.render.text import resolved_yaml
from halftune.core import log
from halftune.core.launcher import ignored, this_process
from halftune.core.startup import quick_imports
from halftune.hardware.probe import probe
from halftune.launch.command import command, machine_of, processes
from halftune.launch.machines import find
from halftune.plan import explain, resolve
from halftune.plan.memory import check_fits
from halftune.train.folder import already_finished
from halftune.train.lock import check_unlocked

PROFILED = 4  # steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``halftune train``."""
    add_config_arguments(parser)
    parser.add_argument("--rerun", metavar="RUN_DIR", help="train again what a run folder holds")
    parser.add_argument(
        "--profile", action="store_true", help=f"record some steps with torch.profiler: logging.profile={PROFILED}"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and leave")


def run(args: argparse.Namespace) -> int:
    """Loads, plans, trains; prints the plan first and where everything is at the end."""
    if args.profile:
        args.set.append(f"logging.profile={PROFILED}")
    loaded = load_from(args)
    if args.print_config:
        print(resolved_yaml(loaded), end="")
        return 0
    process = this_process()
    log.configure(process)
    if names := ", ".join(ignored()):
        log.get_logger(__name__).warning("no launcher has started this process: %s has no effect", names)
    if not process.launched and (count := processes(loaded.run, probe())) > 1:
        return start(loaded, count, arguments_of(args))
    train_one(loaded)
    if process.launched:
        from halftune.train.parallel.meeting import part

        part()
    return 0


def start(loaded: LoadedConfig, count: int, arguments: list[str]) -> int:
    """Starts this machine's processes of a run, after every check that needs none of them; does not return."""
    if (machine := machine_of(loaded.run.distributed, count)) is not None:
        find(machine)
    check_unlocked(Path(loaded.run.training.output_dir))
    facts = model_facts(loaded)
    memory = resolve(loaded.run, probe(), facts, world_size=count).memory
    check_fits(memory, loaded.run)
    check_inputs(loaded, facts)
    sys.stdout.flush()
    words = command(loaded.run.distributed, count, ["train", *arguments], memory.checkpoint_disk)
    os.execv(words[0], words)


def arguments_of(args: argparse.Namespace) -> list[str]:
    """What a verb with a configuration was called with, for another process."""
    words = ["--config", args.config] if args.config is not None else []
    if (rerun := vars(args).get("rerun")) is not None:
        words += ["--rerun", rerun]
    words += args.overrides
    for value in args.set:
        words += ["--set", value]
    return words + (["--traceback"] if vars(args).get("traceback") else [])


def train_one(loaded: LoadedConfig) -> None:
    """Plans and trains one recipe, after the ones it depends on."""
    for recipe in dependencies(loaded):
        train_one(recipe)
    main, folder = this_process().main, Path(loaded.run.training.output_dir)
    if main:
        check_unlocked(folder)
    if done := already_finished(loaded):
        if main:
            from halftune.train.report.page import bring_up_to_date

            bring_up_to_date(folder)
            _say_where(folder, done)
        return
    hardware, facts = probe(), model_facts(loaded)
    plan = resolve(loaded.run, hardware, facts, world_size=world_size(loaded.run, hardware))
    check_inputs(loaded, facts)
    if main and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # of a job that comes back it has been read
        print(explain(plan), flush=True)
    check_fits(plan.memory, loaded.run)

    with quick_imports():  # of torch, after every check that needs none
        from halftune.train.parallel.together import together
        from halftune.train.trainer import train

    with together(loaded.run, hardware, facts, plan) as agreed:
        check_fits(agreed.memory, loaded.run)
        outcome = train(loaded, agreed)
    if main:
        _say_where(outcome.folder, outcome.message)


def _say_where(folder: Path, message: str) -> None:
    print(message)
    for name in ("report.html", "loss.png", "metrics.jsonl"):
        if (folder / name).exists():
            print(f"  {folder / name}")
    sys.stdout.flush()
