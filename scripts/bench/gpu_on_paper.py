"""Makes docs/measurements/gpu-on-paper.md: predicted speed of LoRA at the sizes of two models. Nothing is measured.

nice python scripts/bench/gpu_on_paper.py > docs/measurements/gpu-on-paper.md      # two minutes of one core
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import planned
from transformers import AutoConfig

from halftune.bench.paper.report import PaperReport, profile
from halftune.hardware.catalogue import lookup

SIZES = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}
HYBRID = {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16}
HYBRID |= {"num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, "tie_word_embeddings": True}
HYBRID |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
HYBRID |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
BF16 = ("h200", "h100", "a100", "rtx4090")  # whose plans are alike but for FlashAttention-3 and float8
FA3, FP8 = ("h200", "h100"), ("h200", "h100", "rtx4090")
GOAL = 18_343  # tokens/s: 1.3 times what NeMo AutoModel publishes for an H100


def report(folder: Path, machine: str, recorded: Any = None, **options: Any) -> PaperReport:
    """The prediction for one machine."""
    training = {"output_dir": str(folder / "run"), "per_device_train_batch_size": 2, "gradient_checkpointing": False}
    tree = {
        "model": {"name_or_path": str(folder)},
        "precision": options.get("precision", "auto"),
        "adapter": {"type": "lora", "rank": 16, "alpha": 32, "target_modules": "all-linear"},
        "data": {"train": "builtin:python-docs", "max_length": 4096, "packing": True},
        "training": {**training, "fused_layers": options.get("fused", True)},
    }
    loaded, plan = planned(tree, folder / "recipe.yaml", machine)
    return profile(loaded.run, plan, lookup(machine), recorded=recorded)


def with_fa3(found: PaperReport) -> Any:
    """The same step with FlashAttention-3's rates."""
    calls = [
        replace(call, cost=replace(call.cost, rate=call.cost.rate.replace("fa2", "fa3")))
        for call in found.recorded.launches
    ]
    return replace(found.recorded, launches=calls)


def table(folder: Path, steps: dict[str, tuple[Any, tuple[str, ...]]], others: dict[str, dict[str, Any]]) -> None:
    """Tokens per second: machines × steps, each on the machines that take it; ``others`` get steps of their own."""
    print(f"| tokens/s | {' | '.join(steps)} |\n|---|{'---|' * len(steps)}")
    for machine in BF16:
        rates = (report(folder, machine, step) if machine in where else None for step, where in steps.values())
        print(f"| {lookup(machine).devices[0].name} | {' | '.join(map(rate, rates))} |")
    for machine, own in others.items():
        print(f"| {lookup(machine).devices[0].name} | {' | '.join(rate(own.get(name)) for name in steps)} |")


def rate(found: PaperReport | None) -> str:
    """Tokens per second, or a dash."""
    return "-" if found is None else f"{found.tokens_per_second:,.0f}"


def dense(folder: Path) -> None:
    """Qwen2.5-7B."""
    AutoConfig.for_model("qwen2", **SIZES).save_pretrained(folder)
    before, after = report(folder, BF16[0], fused=False), report(folder, BF16[0])
    float8 = report(folder, BF16[0], precision={"compute": "bf16", "linear": "fp8"})
    plain, fused, fp8 = "transformers' layers", "fused layers", "fused, linear: fp8"
    steps: dict[str, tuple[Any, tuple[str, ...]]] = {plain: (before.recorded, BF16), fused: (after.recorded, BF16)}
    steps |= {"fused, FlashAttention-3": (with_fa3(after), FA3), fp8: (float8.recorded, FP8)}
    old = {plain: report(folder, "t4", fused=False), fused: report(folder, "t4")}
    table(folder, steps, {"t4": old})
    print(
        "\nOn a T4 in fp16, with torch's own attention. It and the RTX 4090 lack the memory for this model: their rows"
    )
    print("compare speeds. Measured on an H200 at these sizes: [a GPU step](gpu.md).")
    print(f"For comparison: {GOAL:,} tokens/s is 1.3 times the speed that NeMo AutoModel publishes for an H100.")
    for title, found in (("transformers' layers", before), ("fused layers", after), ("fused layers in float8", float8)):
        print(f"\n### H200, {title}\n\n```\n{found.text().partition(chr(10))[2]}\n```")


def hybrid(folder: Path) -> None:
    """Sizes of Qwen3.5-4B: three layers of four have the gated delta rule."""
    AutoConfig.for_model("qwen3_5_text", **HYBRID).save_pretrained(folder)
    found = report(folder, BF16[0])
    before = report(folder, BF16[0], fused=False)
    table(folder, {"transformers' layers": (before.recorded, BF16), "fused layers": (found.recorded, BF16)}, {})
    print("\nThe kernels of the gated delta rule take the time of `SCANS` in the roofline, which is an assumption.")
    print(f"\n### H200, fused layers\n\n```\n{found.text().partition(chr(10))[2]}\n```")


def main() -> None:
    """Print the page."""
    print("# A predicted GPU step\n\n**These are predictions.** One training step ran on")
    print("meta tensors on a CPU. Each kernel takes the time of its bytes or FLOPs at the rates of")
    print("`src/halftune/hardware/roofline.py`. LoRA of rank 16, bf16, two samples of 4,096 tokens in a packed row,")
    print("no checkpointing. Made by `python scripts/bench/gpu_on_paper.py`.\n\n## Sizes of Qwen2.5-7B\n")
    with tempfile.TemporaryDirectory() as folder:
        dense(Path(folder))
        print("\n## A hybrid: sizes of Qwen3.5-4B\n")
        hybrid(Path(folder))


if __name__ == "__main__":
    main()
