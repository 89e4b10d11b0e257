"""Show what a run would be trained on: the data report, and samples with their trained tokens marked.

Trained tokens are green and stand between ⟦ and ⟧; control tokens are reversed. Nothing is trained and no weight is
loaded; the tokenised data is kept for the training run.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from halftune.cli.overrides import add_config_arguments, load_from
from halftune.config.facts.of_recipe import dependencies
from halftune.config.load import LoadedConfig
from halftune.config.sections.model import ModelSection
from halftune.data.preflight import look_over
from halftune.model.preflight import check_folders


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``halftune data``."""
    add_config_arguments(parser)
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="samples to show (default 3)")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="show samples drawn at random, not the first ones")
    parser.add_argument("--find", metavar="TEXT", default="", help="show samples whose text contains this")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, the samples in pieces of text")


def run(args: argparse.Namespace) -> int:
    """Prints the report and samples."""
    loaded = load_from(args)
    config, section = loaded.run, tokenizer_section(loaded)
    check_folders(section, weights=False)
    look_over(config)

    from rich.console import Console
    from rich.rule import Rule

    from halftune.data.pipeline import prepare
    from halftune.data.preview import as_data, listed_rows, pick, preview
    from halftune.data.sample import NO_LABEL
    from halftune.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(section)
    prepared = prepare(config, tokenizer)
    shown = pick(prepared.train, tokenizer, args.samples, seed=args.shuffle, text=args.find)
    if args.json:
        samples = [
            {"where": prepared.train.where([number]), **as_data(prepared.train.sample(number), tokenizer)}
            for number in shown
        ]
        report = prepared.report.to_dict()
        sources, reports = (*config.data.train, *config.data.eval), (*prepared.report.train, *prepared.report.eval)
        rows = [listed_rows(*pair) for pair in zip(sources, reports, strict=True)]
        print(json.dumps({**report, "samples": samples, "rows": rows}, indent=2, ensure_ascii=False))
        return 0
    console = Console()
    console.print(prepared.report.render())
    for number in shown:
        sample = prepared.train.sample(number)
        trained = int((sample.labels != NO_LABEL).sum())
        where = f"sample {number + 1}: {prepared.train.where([number])}"
        console.print(Rule(f"{where} · {len(sample.input_ids)} tokens, {trained} trained", align="left"))
        console.print(preview(sample, tokenizer), soft_wrap=True)
    return 0


def tokenizer_section(loaded: LoadedConfig) -> ModelSection:
    """Which tokenizer to load; where a recipe that this one depends on has not run yet, the one it will start from."""
    section = loaded.run.model
    if section.tokenizer is None and not Path(section.name_or_path).exists():
        for recipe in dependencies(loaded):
            if Path(section.name_or_path).is_relative_to(os.path.normpath(recipe.run.training.output_dir)):
                source = tokenizer_section(recipe)
                return section.model_copy(update={"tokenizer": source.tokenizer or source.name_or_path})
    return section
