"""What the guard costs: calls of attention with and without it, in turn, beside a training step of the tiny model.

python scripts/bench/guard.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from harness import clock, in_turn
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.precision.guard import Guard

ROUNDS, CALLS = 15, 2000


def attend(_: torch.nn.Module, query: torch.Tensor, *__: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Nothing, so that what is measured is the guard."""
    return query, None


def main() -> None:
    """Prints the cost of a clean call, of a step, and their ratio."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**BUILTIN_MODELS["qwen2-tiny"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.randint(0, config.vocab_size, (8, 256))
    operands = [torch.randn(2, 4, 8, 16).to(torch.bfloat16) for _ in range(3)]

    def calls(function: Callable[..., object]) -> float:
        begun = clock()
        for _ in range(CALLS):
            function(model, *operands)
        return (clock() - begun) / CALLS

    def step() -> float:
        begun = clock()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()
        return clock() - begun

    guarded = Guard("cast", "bf16").attention(attend)
    sides = {"raw": lambda: calls(attend), "guarded": lambda: calls(guarded), "step": step}
    middle = {name: statistics.median(values) for name, values in in_turn(sides, ROUNDS).items()}
    cost, layers = middle["guarded"] - middle["raw"], config.num_hidden_layers
    print(f"a clean call: {cost * 1e6:.2f} µs of CPU time; {layers} layers: {cost * layers * 1e6:.1f} µs")
    print(f"a step of the tiny model, 8 × 256 tokens: {middle['step'] * 1e3:.0f} ms of CPU time")
    print(f"guard / step: {100 * cost * layers / middle['step']:.4f} %")


if __name__ == "__main__":
    main()
