"""How much of what training is fed is padding: random batches, batches of like length, token budgets, packed rows.

  python scripts/bench/padding.py data.json [more.json …] [--max-length 2048] [--rows 8] [--accumulation 1]

For each file and all of them together, a Markdown table: the share of padding, forward passes of an epoch, and seconds
of CPU that the order of an epoch takes. The tokenizer is the shipped one.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from halftune.config.run import RunConfig
from halftune.data.fed import micro_batch_rows, padded_tokens
from halftune.data.order import BatchRule, Row, epoch_rows, padded_batches
from halftune.data.pipeline import prepare
from halftune.model.tokenizer import load_tokenizer


def lengths_of(paths: list[str], max_length: int) -> np.ndarray:
    tree: dict[str, Any] = {
        "model": {"name_or_path": "builtin:qwen2-tiny"},
        "data": {"train": [{"path": path} for path in paths], "max_length": max_length},
        "training": {"output_dir": "unused"},
    }
    config = RunConfig.model_validate(tree)
    return prepare(config, load_tokenizer(config.model)).train.lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    asked = parser.parse_args()
    print(
        "| data | samples, mean length | batches | padding | forward passes | order, CPU-s |\n|---|---|---|---|---|---|"
    )
    sets = [[path] for path in asked.files] + ([asked.files] if len(asked.files) > 1 else [])
    for paths in sets:
        lengths = lengths_of(paths, asked.max_length)
        name = " + ".join(path.rpartition("/")[2] for path in paths)
        for kind, share, passes, seconds in kinds(lengths, asked.rows, asked.accumulation, asked.max_length):
            what = f"| {name} | {len(lengths):,}, {lengths.mean():.0f} | {kind}"
            print(f"{what} | {share:.1%} | {passes:,} | {seconds:.2f} |")


def kinds(lengths: np.ndarray, rows: int, accumulation: int, max_length: int) -> list[tuple[str, float, int, float]]:
    """(kind of batches, share of padding, forward passes, CPU-seconds of the order), the second epoch's."""
    tokens = rows * max_length
    table = []
    for kind, rule in (
        (f"{rows} rows, random", BatchRule(rows * accumulation)),
        (f"{rows} rows, grouped", BatchRule(rows * accumulation, grouped=True)),
        (f"{tokens:,} tokens, random", BatchRule(rows * accumulation, tokens, accumulation)),
        (f"{tokens:,} tokens, grouped", BatchRule(rows * accumulation, tokens, accumulation, grouped=True)),
    ):
        began = time.process_time()
        batches = padded_batches(lengths, rule, epoch=1, seed=42)
        seconds = time.process_time() - began
        sizes = [micro_batch_rows(batch, rows, rule.tokens) for batch in batches]
        fed = sum(map(padded_tokens, batches, sizes))
        passes = sum(-(-len(batch) // size) for batch, size in zip(batches, sizes, strict=True))
        table.append((kind, 1 - lengths.sum() / fed, passes, seconds))
    began = time.process_time()
    packed: list[Row] = epoch_rows(lengths, epoch=1, seed=42, packing=True, capacity=max_length)
    seconds = time.process_time() - began
    # What is fed are the samples and what fills a forward pass up to a multiple of 8: empty room costs nothing.
    passes = -(-len(packed) // rows)
    table.append((f"{rows} packed rows", 3.5 * passes / (lengths.sum() + 3.5 * passes), passes, seconds))
    return table


if __name__ == "__main__":
    main()
