"""Makes docs/measurements/cpu-on-paper.md: does the paper profiler predict steps on this CPU that it has not seen?

OMP_NUM_THREADS=1 python scripts/bench/cpu_on_paper.py > docs/measurements/cpu-on-paper.md      # three minutes

Rates of products, attention and copies are measured. Three numbers are fitted to the steps of some models: the share of
the first two that a step reaches, the share of the last, and the time of a call. With them the steps of five other
models are predicted. A step is LoRA in fp32 with transformers' layers, which makes the same calls on paper as on a CPU
(tests/bench). Times are CPU-seconds of one thread, the least of several rounds, so that other work counts little.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import clock, head, in_turn, machine, planned, row
from torch.nn.functional import scaled_dot_product_attention as attention
from transformers import AutoConfig

from halftune.bench.paper.kinds import ATTENTION
from halftune.bench.paper.step import Recorded, micro_batch, record_step, state
from halftune.hardware.catalogue import lookup
from halftune.model.attention.register import registered_attention
from halftune.model.meta.model import build, prepare, read_config
from halftune.train.loop.step import finish_step, start_step

TOKENS, ROUNDS = 512, 12
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
Sizes = tuple[str, tuple[int, int, int, int, int], dict[str, Any]]
FITTED: list[Sizes] = [
    ("llama", (256, 704, 6, 4, 2), {}),
    ("llama", (768, 2048, 2, 12, 4), {}),
    ("llama", (192, 2304, 3, 3, 1), {}),
    ("qwen2", (512, 1408, 3, 8, 2), {}),
    ("qwen2", (128, 512, 12, 2, 1), {}),
    ("qwen2", (32, 96, 12, 1, 1), {}),  # little but calls
    ("qwen3", (384, 1024, 4, 6, 2), {"head_dim": 64}),
]
PREDICTED: list[Sizes] = [
    ("qwen2", (896, 4864, 2, 14, 2), {}),
    ("mistral", (512, 1792, 4, 8, 2), {"head_dim": 64}),
    ("gemma", (256, 2048, 4, 4, 1), {"head_dim": 64}),
    ("olmo2", (640, 1728, 3, 10, 10), {}),
    ("qwen3_moe", (256, 704, 4, 4, 2), {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2,
                                        "moe_intermediate_size": 512}),
]  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """Of one thread: FLOP/s of products, of attention forward and backward, and bytes/s of copies, read and written."""

    products: float
    attention: tuple[float, float]
    bandwidth: float


def least(work: Callable[[], Any], times: int = 30) -> float:
    """CPU-seconds of the fastest of several calls."""
    return min(seconds(work) for _ in range(times))


def seconds(work: Callable[[], Any]) -> float:
    """CPU-seconds of a call."""
    before = clock()
    work()
    return clock() - before


def rates() -> Rates:
    """Measure them with sizes like those of the models."""
    a, b = torch.randn(TOKENS, 1024), torch.randn(1024, 2048)
    products = 2 * TOKENS * 1024 * 2048 / least(lambda: a @ b)
    q, k, v = (torch.randn(1, 8, TOKENS, 64, requires_grad=True) for _ in range(3))
    pairs = 4 * 64 * 8 * TOKENS * (TOKENS + 1) / 2  # FLOPs of the visible pairs
    forward = least(lambda: attention(q, k, v, is_causal=True))
    both = least(lambda: attention(q, k, v, is_causal=True).sum().backward())
    x = torch.randn(1 << 22)
    y = torch.empty_like(x)
    bandwidth = 2 * x.nbytes / least(lambda: y.copy_(x))
    return Rates(products, (pairs / forward, 2.5 * pairs / (both - forward)), bandwidth)


def parts(made: Recorded, rate: Rates) -> list[float]:
    """Seconds of products with attention and of other traffic at these rates, and the number of calls."""
    computed = moving = 0.0
    for launch in made.launches:
        cost = launch.cost
        moved = (cost.read + cost.written) / rate.bandwidth
        if launch.kind == ATTENTION:
            computed += cost.flops / rate.attention["backward" in launch.op]
        elif cost.flops:
            computed += max(cost.flops / rate.products, moved)
        else:
            moving += moved
    return [computed, moving, float(len(made.launches))]


def one(sizes: Sizes, folder: Path, stack: ExitStack) -> tuple[Recorded, Callable[[], Any]]:
    """A model's step on paper, and the same step on this CPU."""
    kind, numbers, more = sizes
    raw = dict(zip(NAMES, numbers, strict=True)) | {"vocab_size": 8192, "pad_token_id": 0} | more
    AutoConfig.for_model(kind, **raw).save_pretrained(folder)
    training = {"output_dir": str(folder / "run"), "per_device_train_batch_size": 1, "fused_layers": False}
    tree = {
        "model": {"name_or_path": str(folder)},
        "precision": "fp32",
        "attention": "sdpa",
        "adapter": {"type": "lora", "rank": 16, "target_modules": "all-linear"},
        "data": {"train": "builtin:python-docs", "max_length": TOKENS, "packing": False},
        "training": training | {"gradient_checkpointing": False},
    }
    loaded, plan = planned(tree, folder / "recipe.yaml", "cpu")
    config = loaded.run
    made = record_step(config, plan, lookup("h200").devices[0])
    name = stack.enter_context(registered_attention(plan))
    model: Any = prepare(build(read_config(config.model), config.model, plan, name), config, plan, None)
    run = state(config, plan, model, torch.device("cpu"))
    batches = [micro_batch(run, TOKENS)]
    return made, lambda: finish_step(run, start_step(run, batches))


def fit(times: list[list[float]], measured: list[float]) -> torch.Tensor:
    """Non-negative factors of the parts with the least relative errors, by projected gradients."""
    matrix = torch.tensor(times, dtype=torch.float64) / torch.tensor(measured, dtype=torch.float64)[:, None]
    scale = matrix.mean(0)
    matrix = matrix / scale
    found = torch.full((matrix.shape[1],), 1.0 / matrix.shape[1], dtype=torch.float64)
    step = 1 / torch.linalg.matrix_norm(matrix, 2) ** 2
    for _ in range(200_000):
        found = (found - step * matrix.T @ (matrix @ found - 1)).clamp(min=0)
    return found / scale


def main() -> None:
    """Print the page."""
    torch.set_num_threads(1)
    rate = rates()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        steps = [one(sizes, Path(folder), stack) for sizes in [*FITTED, *PREDICTED]]
        found = in_turn({str(index): partial(seconds, step) for index, (_, step) in enumerate(steps)}, ROUNDS, warm=2)
    times, measured = [parts(made, rate) for made, _ in steps], [min(each) for each in found.values()]
    factors = fit(times[: len(FITTED)], measured[: len(FITTED)])
    guesses = (torch.tensor(times, dtype=torch.float64) @ factors).tolist()
    print("# A predicted CPU step\n")
    print(
        "How well does the [paper profiler](gpu-on-paper.md) predict models that it was not fitted to? Tried on a CPU,"
    )
    print("since anyone has one. LoRA of rank 16, fp32, transformers' layers, one row of 512 tokens, one thread;")
    print(
        "CPU-seconds, the least of twelve steps, beside other work. Made by `python scripts/bench/cpu_on_paper.py`.\n"
    )
    print(machine())
    giga = [number / 1e9 for number in (rate.products, *rate.attention, rate.bandwidth)]
    computing, moving = (f"{1 / one:.0%}" if one else "no time" for one in factors.tolist()[:2])
    print(
        f"\nMeasured rates: products {giga[0]:.0f} GFLOP/s, attention {giga[1]:.0f} forward and {giga[2]:.0f} backward,"
    )
    print(f"copies {giga[3]:.1f} GB/s read and written. Fitted to {len(FITTED)} models: products and attention reach")
    print(f"{computing} of their rates, other traffic {moving}; a call takes {factors[2] * 1e6:.1f} µs.\n")
    print(head("model", "width", "layers", "calls", "tokens/s measured", "predicted", "error", "fitted to it"))
    errors = []
    for index, ((kind, numbers, _), (made, _)) in enumerate(zip([*FITTED, *PREDICTED], steps, strict=True)):
        error = measured[index] / guesses[index] - 1
        fitted = index < len(FITTED)
        errors += [] if fitted else [abs(error)]
        cells = (numbers[0], numbers[2], f"{len(made.launches):,}", f"{TOKENS / measured[index]:,.0f}")
        print(row(kind, *cells, f"{TOKENS / guesses[index]:,.0f}", f"{error:+.0%}", "yes" if fitted else "no"))
    near = sum(error <= 0.2 for error in errors)
    print(f"\nOf the five others, {near} are within 20 %. The largest error is {max(errors):.0%}.")
    print("Wide feed-forward layers are predicted too fast: their activation is arithmetic, of which only bytes count.")


if __name__ == "__main__":
    main()
