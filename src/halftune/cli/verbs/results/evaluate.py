"""Measure results beside their base models: loss, perplexity, answers against references, tasks.

halftune evaluate runs/quickstart                             the run's evaluation set, beside its base model
halftune evaluate runs/a runs/b --data test.jsonl             two runs on the rows of a file
halftune evaluate runs/a/checkpoint-40 runs/a --metrics exact,f1,rouge,chrf --limit 200
halftune evaluate models/merged Qwen/Qwen3-0.6B --data builtin:number-formats-test     plain models
halftune evaluate runs/a --data test.jsonl --fail-above loss=1.5 --fail-below exact=0.8       exit code 4 beyond a limit
halftune evaluate runs/a --tasks arc_easy,hellaswag           with lm-evaluation-harness
halftune evaluate runs/a --no-base data.max_length=4096 --json

Each model runs under its run's plan: dtypes, attention, chat template, labels. Loss and perplexity are per trained
token, as training's evaluation computes them. Scores, a plot and answers are written to the evaluation folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from halftune.cli.overrides import positive
from halftune.core import log
from halftune.core.errors import ConfigError
from halftune.core.optional import quick_imports
from halftune.core.processes.signals import unwound_by_signals

if TYPE_CHECKING:
    from halftune.evaluate.targets import Target

FAILED = 4  # exit code where a score is beyond a limit
_OVERRIDE = re.compile(r"[A-Za-z_][\w.\[\]]*=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune evaluate``."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run folder, its YAML file, a checkpoint, a model folder or a hub id"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a change to each configuration, as KEY=VALUE"
    )
    parser.add_argument(
        "--data", metavar="DATA", help="a file, builtin:NAME or a hub id; default the first run's evaluation set"
    )
    parser.add_argument(
        "--base", action=argparse.BooleanOptionalAction, help="also measure base models (default: of adapters)"
    )
    parser.add_argument(
        "--metrics", metavar="NAMES", default="", help="of answers to the rows' prompts: exact,squad,f1,rouge,chrf"
    )
    parser.add_argument("--tasks", metavar="NAMES", default="", help="tasks of lm-evaluation-harness")
    parser.add_argument("--include-path", metavar="DIR", type=Path, help="with --tasks: a folder with further tasks")
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N rows, or documents of each task")
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", help="longest answer (default: the run's)")
    parser.add_argument("--output", metavar="DIR", type=Path, help="default: evaluation/ in the first run's folder")
    for option, beyond in (("--fail-below", "below"), ("--fail-above", "above")):
        parser.add_argument(
            option, action="append", default=[], metavar="METRIC=VALUE", help=f"exit with code 4 {beyond} this value"
        )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(overrides=[])


def run(args: argparse.Namespace) -> int:
    """Check options and open the models without their weights, then measure one after the other."""
    overrides = [one for one in args.runs if _OVERRIDE.match(one) and not os.path.exists(one)]
    given = [one for one in args.runs if one not in overrides]
    if not given:
        raise ConfigError("no run given", remedy="use for example halftune evaluate runs/mine", code="cli.no_recipe")
    for option, needed in (("max_new_tokens", "metrics"), ("include_path", "tasks")):
        if vars(args)[option] is not None and not vars(args)[needed]:
            what = f"--{option.replace('_', '-')} requires --{needed}"
            raise ConfigError(what, remedy=f"add --{needed}, or remove it", code="cli.option_conflict")
    log.configure()
    with quick_imports():
        from halftune.evaluate.harness import Harness
        from halftune.evaluate.measure import Asked, measure
        from halftune.evaluate.metrics import LOSS, PERPLEXITY, answer_metrics
        from halftune.evaluate.output import write
        from halftune.evaluate.rows import choose_rows
        from halftune.evaluate.scores import as_json, compare, table
        from halftune.evaluate.targets import open_targets
        from halftune.evaluate.thresholds import threshold, verdicts

    answered, tasks = answer_metrics(_names(args.metrics)), _names(args.tasks)
    with_rows = bool(answered or args.data or not tasks)  # tasks alone have their own rows
    known = [*((LOSS.name, PERPLEXITY.name) if with_rows else ()), *(one.metric.name for one in answered)]
    limits = [
        threshold(text, known, tasks, below=below)
        for below, texts in ((True, args.fail_below), (False, args.fail_above))
        for text in texts
    ]
    harness = Harness(tasks, args.include_path, args.limit) if tasks else None
    with unwound_by_signals(), TemporaryDirectory() as scratch:
        targets = open_targets(given, [*overrides, *args.set], Path(scratch), base=args.base)
        rows = choose_rows(args.data, targets, args.limit) if with_rows else None
        measured = measure(targets, Asked(rows, bool(answered), args.max_new_tokens, harness))
    scores = compare("" if rows is None else rows.what, measured, answered)
    judged = verdicts(scores, limits)
    made = {**as_json(scores), "thresholds": [one.as_json() for one in judged]}
    files = write(_output(args.output, targets), scores, answered, made)
    if args.json:
        print(json.dumps({**made, "files": list(map(str, files))}, indent=1, ensure_ascii=False))
    else:
        print("\n".join([table(scores), *(one.describe() for one in judged), f"written to {files[0].parent}"]))
    return FAILED if any(one.failed for one in judged) else 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _output(given: Path | None, targets: Sequence[Target]) -> Path:
    """The folder to write: beside the result of the first run, or in the working directory if there is none."""
    from halftune.evaluate.output import FOLDER

    if given is not None:
        return Path(os.path.expanduser(given))
    first = next((one.run.folder for one in targets if one.trained_here), Path())
    return first / FOLDER
