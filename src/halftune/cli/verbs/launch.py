"""Start a run on several devices and machines, or print the command or a job.

halftune launch --config x.yaml --dry-run                  print this machine's command (--json: as a list)
halftune launch --config x.yaml distributed.num_machines=2 distributed.main_process_ip=10.0.0.1 --dry-run
halftune launch --config x.yaml --template slurm           print a batch script (or kubernetes, skypilot)
halftune launch --config x.yaml                            the same as halftune train
"""

from __future__ import annotations

import argparse
import json
import shlex

from halftune.cli.overrides import add_config_arguments, load_from
from halftune.cli.verbs import train
from halftune.cli.verbs.train import arguments_of
from halftune.hardware.probe import probe
from halftune.launch.command import command, world_size
from halftune.launch.templates import TEMPLATES, render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune launch``."""
    add_config_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the command and exit")
    parser.add_argument("--json", action="store_true", help="print it as a JSON list of arguments")
    parser.add_argument("--template", choices=sorted(TEMPLATES), help="print a job for a scheduler and exit")
    parser.set_defaults(sweep=None, profile=False, print_config=False)


def run(args: argparse.Namespace) -> int:
    """Print the command or a job, or start the run."""
    if not (args.template or args.dry_run or args.json):
        return train.run(args)
    loaded = load_from(args)
    count, arguments = world_size(loaded.run, probe()), arguments_of(args)
    if args.template:
        print(render(args.template, loaded.run, count, ["train", *arguments]), end="")
        return 0
    words = command(loaded.run.distributed, count, ["train", *arguments])
    print(json.dumps(words, ensure_ascii=False) if args.json else shlex.join(words))
    return 0
