"""Train from a YAML file.

train --config configs/quickstart.yaml
train --config x.yaml training.learning_rate=1e-4 precision=auto
train --config x.yaml --print-config        print the resolved configuration with the origin of each value
train --config x.yaml --profile             profile a few steps: a trace, and tables of time per operator
train --config x.yaml distributed.num_processes=2      number of processes; default one per visible device
train --rerun runs/my-run training.output_dir=runs/again
train --config x.yaml --sweep sweep.yaml    several values of some keys, one run after the other
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from halftune.cli.overrides import add_config_arguments, load_from
from halftune.config.facts.model import ModelFacts
from halftune.config.load import LoadedConfig
from halftune.config.recipe_facts import dependencies, model_facts
from halftune.config.render import resolved_yaml
from halftune.core import log
from halftune.core.errors import ConfigError
from halftune.core.optional import quick_imports
from halftune.core.processes.process import ignored, this_process
from halftune.hardware import Hardware
from halftune.hardware.probe import probe
from halftune.launch.command import command, machine_of, processes, world_size
from halftune.plan import Plan, explain, resolve
from halftune.plan.memory import check_fits
from halftune.train.run_folder.lock import check_unlocked
from halftune.train.run_folder.start_or_resume import already_finished

if TYPE_CHECKING:
    from halftune.train.trainer import Outcome

PROFILED = 4  # steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune train``."""
    add_config_arguments(parser)
    parser.add_argument("--rerun", metavar="RUN_DIR", help="train again with the configuration of a run folder")
    parser.add_argument(
        "--profile", action="store_true", help=f"profile some steps with torch.profiler (logging.profile={PROFILED})"
    )
    parser.add_argument("--sweep", metavar="YAML", help="values of keys to try; one run for each combination")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")


def run(args: argparse.Namespace) -> int:
    """Load, plan and train; prints the plan first and the locations of results at the end."""
    if args.sweep is not None:
        return _sweep(args)
    if args.profile:
        args.set.append(f"logging.profile={PROFILED}")
    loaded = load_from(args)
    if args.print_config:
        print(resolved_yaml(loaded), end="")
        return 0
    process = this_process()
    log.configure(process)
    if names := ", ".join(ignored()):
        log.get_logger(__name__).warning("ignoring %s: this process was not started by a launcher", names)
    if not process.launched and (count := processes(loaded.run, probe())) > 1:
        return start(loaded, count, arguments_of(args))
    for recipe in in_order(loaded):
        with checked(recipe) as start_training:
            outcome = start_training and start_training()
        if outcome and process.main:
            _print_result(outcome.folder, outcome.message)
    if process.launched:
        from halftune.train.parallel.rendezvous import part

        part()
    return 0


def _sweep(args: argparse.Namespace) -> int:
    """Train every trial of a sweep.

    Raises:
        ConfigError: options that do not go with it.
    """
    from halftune.cli import sweep

    for name in ("rerun", "profile", "print_config"):
        if vars(args)[name]:
            what = f"--sweep and --{name.replace('_', '-')} are mutually exclusive"
            raise ConfigError(what, remedy="remove one of them", code="cli.option_conflict")
    if this_process().launched:
        what = "--sweep starts the processes of each run itself"
        raise ConfigError(what, remedy="start it by halftune train", code="cli.option_conflict")
    return sweep.run(args)


def start(loaded: LoadedConfig, count: int, arguments: list[str]) -> int:
    """Start this machine's processes of a run after the checks that do not need them; does not return."""
    from halftune.cli.preflight import check_inputs, check_outcome

    if (machine := machine_of(loaded.run.distributed, count)) is not None:
        from halftune.launch.machines import check_main_address

        check_main_address(machine)
    check_unlocked(Path(loaded.run.training.output_dir))
    facts = model_facts(loaded)
    memory = resolve(loaded.run, probe(), facts, world_size=count).memory
    check_outcome(loaded, memory)
    check_inputs(loaded, facts)
    sys.stdout.flush()
    words = command(loaded.run.distributed, count, ["train", *arguments], memory.checkpoint_disk)
    os.execv(words[0], words)


def arguments_of(args: argparse.Namespace) -> list[str]:
    """Return a verb's arguments, for starting another process."""
    words = ["--config", args.config] if args.config is not None else []
    if (rerun := vars(args).get("rerun")) is not None:
        words += ["--rerun", rerun]
    words += args.overrides
    for value in args.set:
        words += ["--set", value]
    return words + (["--traceback"] if vars(args).get("traceback") else [])


def in_order(loaded: LoadedConfig) -> Iterator[LoadedConfig]:
    """A recipe, after those that it depends on."""
    for recipe in dependencies(loaded):
        yield from in_order(recipe)
    yield loaded


@contextmanager
def checked(loaded: LoadedConfig, *, show: bool = True) -> Iterator[Callable[..., Outcome] | None]:
    """Plan a recipe and check what can be checked before training.

    Args:
        loaded: the recipe.
        show: whether to print the plan, or where an earlier result is.

    Yields:
        what trains it, as ``train`` without its first two arguments; None if it is finished.
    """
    process, folder = this_process(), Path(loaded.run.training.output_dir)
    main = process.main
    if main:
        check_unlocked(folder)
    if done := already_finished(loaded):
        if main:
            from halftune.train.report.page import bring_up_to_date

            bring_up_to_date(folder)
            if show:
                _print_result(folder, done)
        yield None
        return
    from halftune.cli.preflight import check_inputs  # late: imports NumPy

    hardware, facts = probe(), model_facts(loaded)
    plan = resolve(loaded.run, hardware, facts, world_size=world_size(loaded.run, hardware))
    check_inputs(loaded, facts, thorough=not process.launched)
    if show and main and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # printed before a restart already
        print(explain(plan), flush=True)
    check_fits(plan.memory, loaded.run)

    with quick_imports():  # torch, after all checks that do not need it
        from halftune.model.files.preflight import check_all_folders
        from halftune.train.trainer import train

    with _processes_together(loaded, hardware, facts, plan) as agreed:
        check_fits(agreed.memory, loaded.run)
        if process.launched and main:  # here, as the others wait for as long as this one gives signs of life
            check_all_folders(loaded.run, thorough=True)
        yield partial(train, loaded, agreed)


def _processes_together(
    loaded: LoadedConfig, hardware: Hardware, facts: ModelFacts, plan: Plan
) -> AbstractContextManager[Plan]:
    if plan.batch.world_size == 1:
        return nullcontext(plan)
    from halftune.train.parallel.together import together

    return together(loaded.run, hardware, facts, plan)


def _print_result(folder: Path, message: str) -> None:
    print(message)
    for name in ("report.html", "loss.png", "metrics.jsonl"):
        if (folder / name).exists():
            print(f"  {folder / name}")
    sys.stdout.flush()
