"""What the guard costs: calls of attention with and without it, in turn, beside a training step of the tiny model.

python scripts/bench/guard.py
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.precision.guard import Guard

ROUNDS, CALLS = 15, 2000


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Nothing, so that what is measured is the guard."""
    return query, None


def per_call(function: object, module: torch.nn.Module, operands: list[torch.Tensor]) -> float:
    """CPU-seconds of one call."""
    begun = time.process_time()
    for _ in range(CALLS):
        function(module, *operands)  # type: ignore[operator]
    return (time.process_time() - begun) / CALLS


def main() -> None:
    """Prints the cost of a clean call, of a step, and their ratio."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**BUILTIN_MODELS["qwen2-tiny"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.randint(0, config.vocab_size, (8, 256))
    operands = [torch.randn(2, 4, 8, 16).to(torch.bfloat16) for _ in range(3)]
    guarded = Guard("cast", "bf16").attention(attend)
    clean, raw, steps = [], [], []
    for _ in range(ROUNDS):
        raw.append(per_call(attend, model, operands))
        clean.append(per_call(guarded, model, operands))
        begun = time.process_time()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        steps.append(time.process_time() - begun)
        model.zero_grad()
    cost = statistics.median(clean) - statistics.median(raw)
    layers = config.num_hidden_layers
    step = statistics.median(steps)
    print(f"a clean call: {cost * 1e6:.2f} µs of CPU time; {layers} layers: {cost * layers * 1e6:.1f} µs")
    print(f"a step of the tiny model, 8 × 256 tokens: {step * 1e3:.0f} ms of CPU time")
    print(f"guard / step: {100 * cost * layers / step:.4f} %")


if __name__ == "__main__":
    main()
