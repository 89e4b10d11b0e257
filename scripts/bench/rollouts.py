"""Answers sampled by ``generate`` in one padded batch, as GRPO samples them, beside transformers' continuous batching.

  python scripts/bench/rollouts.py                     Markdown table on stdout: answer tokens per CPU-second

Prompts of 16 to 128 tokens with eight answers each; answers end at random, at half of the longest allowed on average.
Random weights, 4,096 words, fp32, one thread, no adapter. The two take turns; the table holds medians over the rounds.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from beside_trl import MODELS
from harness import clock, head, in_turn, row, tiny_model
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

WORDS, GROUP = 4_096, 8
CASES = (("tiny", 64, 32), ("tiny", 256, 32), ("tiny", 64, 128), ("small", 64, 32))


def sides(size: str, longest: int, answers: int, folder: Path) -> dict[str, Callable[[], float]]:
    """Functions that sample once and give tokens per CPU-second."""
    tiny_model(folder, vocab_size=WORDS, **MODELS[size])
    draw = random.Random(0)
    lengths = [draw.randint(16, 128) for _ in range(answers // GROUP)]
    prompts = [[draw.randrange(3, WORDS) for _ in range(length)] for length in lengths for _ in range(GROUP)]
    ends = list(range(10, 10 + round(WORDS / (longest / 2))))
    settings = GenerationConfig(
        max_new_tokens=longest, do_sample=True, top_k=0, eos_token_id=ends, pad_token_id=0, use_cache=True
    )
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2)]

    def padded() -> int:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in prompts])
        made = models[0].generate(ids, attention_mask=(ids > 0).long(), generation_config=settings)[:, width:]
        return sum(int((~torch.isin(one, torch.tensor(ends))).cumprod(0)[:-1].sum()) + 1 for one in made)

    def continuous() -> int:
        blocks = ContinuousBatchingConfig(num_blocks=600, max_batch_tokens=512)
        options = {"generation_config": settings, "continuous_batching_config": blocks, "progress_bar": False}
        return sum(len(one.generated_tokens) for one in models[1].generate_batch(inputs=prompts, **options).values())

    def timed(sample: Callable[[], int]) -> Callable[[], float]:
        def side() -> float:
            start = clock()
            with torch.no_grad():
                tokens = sample()
            return tokens / (clock() - start)

        return side

    return {"padded": timed(padded), "continuous": timed(continuous)}


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    print(head("model", "longest answer", "answers", "tokens / CPU-s, padded", "continuous", "ratio"))
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = in_turn(sides(*case, Path(folder)), asked.rounds)
        one, other = (statistics.median(found[name]) for name in ("padded", "continuous"))
        print(row(*case, f"{one:.0f}", f"{other:.0f}", f"{one / other:.2f}"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
