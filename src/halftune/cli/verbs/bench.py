"""Measure the training speed of recipes: tokens per second and per CPU-second, step times, MFU, memory, start-up.

halftune bench --config x.yaml                                  20 steps after 3 warm-up steps
halftune bench --config x.yaml --vary data.packing=false --vary "precision=bf16 attention=sdpa"
                                                                compare the recipe with its variants
halftune bench --config a.yaml --config b.yaml --repeat 5 --json
halftune bench --config x.yaml --steps 50 training.per_device_train_batch_size=2
halftune bench --paper --hardware h200 --config x.yaml          predict on paper: no GPU, no weights, nothing measured
halftune bench --paper --hardware h200,h100,a100 --price 3.5,2.5,1.5 --compare transformers --config x.yaml

Every run is a separate process in a temporary folder: training.output_dir is not used, and nothing is evaluated or
saved. On a CPU, OMP_NUM_THREADS=1 gives the most stable numbers.

With --paper, one step of the recipe's model runs on tensors without data. Every kernel is counted and takes the time
that its bytes or FLOPs need on that GPU; the model's config.json is enough.
"""

from __future__ import annotations

import argparse
import json
import math
import sys

from halftune.bench.compare import cases, compare
from halftune.bench.table import text
from halftune.cli.overrides import positive
from halftune.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune bench``."""
    parser.add_argument("--config", action="append", default=[], metavar="YAML", help="a recipe; may be repeated")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="training.learning_rate=1e-4 …; for all runs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an override, written as an option"
    )
    parser.add_argument(
        "--vary", action="append", default=[], metavar="'KEY=VALUE …'", help="also measure with these overrides"
    )
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="measured steps (default 20)")
    parser.add_argument("--warmup", type=positive, default=3, metavar="N", help="warm-up steps (default 3)")
    parser.add_argument("--repeat", type=positive, metavar="N", help="runs of each (default 1, or 3 in a comparison)")
    parser.add_argument("--paper", action="store_true", help="predict on paper, for --hardware, without a GPU")
    parser.add_argument("--hardware", metavar="NAME[,NAME …]", help="with --paper: GPUs such as h200, a100-40, l4")
    parser.add_argument(
        "--price", type=prices, metavar="N[,N …]", help="with --paper: price of an hour of each GPU, in any currency"
    )
    parser.add_argument(
        "--compare", choices=["transformers"], help="with --paper: also predict transformers with peft, all logits"
    )
    parser.add_argument(
        "--with", dest="packages", action="append", default=[], metavar="PACKAGE=VERSION",
        help="with --paper: assume that this package is installed",
    )  # fmt: skip
    parser.add_argument(
        "--sample-length", type=positive, metavar="N", help="with --paper: tokens of a sample (default data.max_length)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def prices(text: str) -> list[float]:
    """Parse positive numbers, separated by commas."""
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < one < math.inf for one in found):
        raise argparse.ArgumentTypeError(f"expected positive numbers separated by commas, got {text!r}")
    return found


def run(args: argparse.Namespace) -> int:
    """Check every configuration, then measure them in turn."""
    if not args.config:
        what = "no recipe given"
        raise ConfigError(what, remedy="use --config, as in --config configs/quickstart.yaml", code="cli.no_recipe")
    if args.paper:
        from halftune.cli.bench_paper import predict  # without measuring

        return predict(args)
    if args.hardware or args.packages or args.sample_length or args.price or args.compare:
        what = "--hardware, --with, --sample-length, --price and --compare require --paper"
        raise ConfigError(what, remedy="add --paper; without it, this machine is measured", code="cli.option_conflict")
    chosen = cases(args.config, [*args.overrides, *args.set], args.vary)
    repeat = args.repeat or (3 if len(chosen) > 1 else 1)
    results = compare(chosen, steps=args.steps, warm_up=args.warmup, repeat=repeat, tell=_tell)
    if args.json:
        print(json.dumps({"steps": args.steps, "warm_up": args.warmup, "results": results}, indent=1))
    else:
        print(text(results, steps=args.steps, warm_up=args.warmup))
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
