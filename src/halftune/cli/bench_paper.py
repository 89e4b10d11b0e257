"""``halftune bench --paper``: predicts the speed of recipes on a GPU that need not be there."""

from __future__ import annotations

import argparse
import json
from typing import Any

from halftune.config.load import load_config
from halftune.config.recipe_facts import model_facts
from halftune.core.errors import ConfigError
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve
from halftune.plan.duration import Pace, duration


def predict(args: argparse.Namespace) -> int:
    """Profile every recipe and variant on paper and print the reports.

    Raises:
        ConfigError: no machine is named.
        HalftuneError: a recipe cannot be planned or profiled for it.
    """
    if not args.hardware:
        what = "--paper needs a machine to predict for"
        raise ConfigError(what, remedy="add --hardware, as in --hardware h200", code="cli.option_conflict")
    hardware = lookup(args.hardware, dict(entry.partition("=")[::2] for entry in args.packages))
    from halftune.bench.paper.report import profile  # imports torch

    found: list[dict[str, Any]] = []
    for config in args.config:
        for variant in ("", *args.vary):
            loaded = load_config(config, [*args.overrides, *args.set, *variant.split()])
            plan = resolve(loaded.run, hardware, model_facts(loaded))
            report = profile(loaded.run, plan, hardware, sample=args.sample_length)
            found.append({"config": config, "variant": variant, **report.to_dict()})
            if not args.json:
                print("\n".join((*(["", variant] if variant else []), report.text())), flush=True)
                if loaded.run.training.max_steps is not None:
                    pace = Pace(report.tokens_per_second, plan.batch.tokens_per_step, None)
                    print(duration(loaded.run, plan, pace, "predicted"))
    if args.json:
        print(json.dumps({"results": found}, indent=1))
    return 0
