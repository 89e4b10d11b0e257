"""Show a run's training data: the data report, and samples with trained tokens marked.

Trained tokens are green and enclosed in ⟦ ⟧; control tokens have inverted colours. No weights are loaded; the tokenised
data is cached for training.
"""

from __future__ import annotations

import argparse
import json

from halftune.cli.overrides import add_config_arguments, load_from
from halftune.config.load import LoadedConfig
from halftune.config.recipe_facts import present_model
from halftune.config.sections.model import ModelSection
from halftune.core.optional import quick_imports
from halftune.data.preflight import validate_data
from halftune.model.files.preflight import check_folders


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune data``."""
    add_config_arguments(parser)
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="samples to show (default 3)")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="show random samples instead of the first ones")
    parser.add_argument("--find", metavar="TEXT", default="", help="show samples whose text contains this")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, with samples as text pieces")


def run(args: argparse.Namespace) -> int:
    """Print the report and samples."""
    loaded = load_from(args)
    config, section = loaded.run, tokenizer_section(loaded)
    check_folders(section, weights=False)
    validate_data(config)

    from rich.console import Console
    from rich.rule import Rule

    with quick_imports():
        from halftune.data.pipeline import prepare
        from halftune.data.preview import as_data, counts, listed_rows, pick, preview
        from halftune.model.files.locate import media_of
        from halftune.model.tokenizer.tokenizer import load_tokenizer

        if config.data.media:  # few runs have images
            from halftune.data.media.preview import MediaPreview

    tokenizer = load_tokenizer(section)
    settings = media_of(config)
    prepared = prepare(config, tokenizer, images=settings)
    media = MediaPreview(settings, tokenizer) if settings is not None else None
    shown = pick(prepared.train, tokenizer, args.samples, seed=args.shuffle, text=args.find)
    if args.json:
        samples = [
            {
                "where": prepared.train.where([number]),
                **as_data(example, tokenizer),
                "media": media.as_data(example) if media is not None else [],
            }
            for number, example in ((number, prepared.train.example(number)) for number in shown)
        ]
        report = prepared.report.to_dict()
        sources, reports = (*config.data.train, *config.data.eval), (*prepared.report.train, *prepared.report.eval)
        rows = [listed_rows(*pair) for pair in zip(sources, reports, strict=True)]
        print(json.dumps({**report, "samples": samples, "rows": rows}, indent=2, ensure_ascii=False))
        return 0
    console = Console()
    console.print(prepared.report.render())
    for number in shown:
        example = prepared.train.example(number)
        tokens, trained = counts(example)
        where = f"sample {number + 1}: {prepared.train.where([number])}"
        console.print(Rule(f"{where} · {tokens} tokens, {trained} trained", align="left"))
        for one in media.of(example) if media is not None else ():
            console.print(str(one), style="dim", highlight=False, markup=False)
        console.print(preview(example, tokenizer), soft_wrap=True)
    return 0


def tokenizer_section(loaded: LoadedConfig) -> ModelSection:
    """Return the tokenizer to load; if a recipe that this one depends on has not run yet, that recipe's tokenizer."""
    section, present = loaded.run.model, present_model(loaded)
    if section.tokenizer or present is section:
        return section
    return section.model_copy(update={"tokenizer": present.tokenizer or present.name_or_path})
