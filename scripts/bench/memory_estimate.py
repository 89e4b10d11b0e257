"""How far the plan's memory estimate is from reality: trains the builtin models on the CPU and reads the peak RSS.

  python scripts/bench/memory_estimate.py              every case, a Markdown table on stdout
  python scripts/bench/memory_estimate.py full lora    the cases whose name contains one of these words
  python scripts/bench/memory_estimate.py --held-out   cases that the estimate's constants were not fitted to

Each case is a process of its own that trains three steps (the optimizer's states exist from the second on).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BF16 = {"precision": "bf16"}
DORA = {"use_dora": True}
FULL = {"adapter": "none"}
# Qwen3.5's head sizes, half of its heads
WIDE = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
    **{"linear_num_key_heads": 8, "linear_num_value_heads": 16, "hidden_size": 512},
}
# The cases that the constants of hardware/memory.py were fitted to: their error says how well the fit is, no more.
CASES: dict[str, dict[str, Any]] = {
    "small lora fp32, 8×256": {},
    "small lora fp32, 8×512": {"length": 512},
    "small lora fp32, 4×1024 packed": {"length": 1024, "rows": 4, "packing": True},
    "small lora fp32, 8×512, checkpointing": {"length": 512, "checkpointing": True},
    "small lora bf16, 8×512": {"length": 512, "precision": "bf16"},
    "small lora fp32, 8×512, dropout": {"length": 512, "lora": {"dropout": 0.1}},
    "small dora fp32, 8×256": {"lora": DORA},
    "small dora bf16, 8×512": {"length": 512, "lora": DORA, **BF16},
    "small full fp32, 8×512": {"length": 512, "adapter": "none"},
    "small full fp32, 8×512, checkpointing": {"length": 512, "adapter": "none", "checkpointing": True},
    "small full fp32, 2×256, accumulation 2": {"rows": 2, "adapter": "none", "accumulation": 2},
    "small full bf16, 8×512": {"length": 512, "adapter": "none", "precision": "bf16"},
    "small full fp32, 4×512, eager": {"length": 512, "rows": 4, "adapter": "none", "attention": "eager"},
    "tiny full fp32, 16×512": {"model": "qwen2-tiny", "length": 512, "rows": 16, "adapter": "none"},
    "llama tiny full fp32, 16×512": {"model": "llama-tiny", "length": 512, "rows": 16, "adapter": "none"},
    "qwen3_5 tiny full fp32, 8×512": {"model": "qwen3_5-tiny", "length": 512, "adapter": "none"},
    "qwen3_5 tiny lora fp32, 8×512": {"model": "qwen3_5-tiny", "length": 512},
    "qwen3_5 wide full fp32, 1×2048": {"model": "qwen3_5-tiny", "changes": WIDE, "rows": 1, "length": 2048, **FULL},
    "qwen3_5 wide lora fp32, 1×512": {"model": "qwen3_5-tiny", "changes": WIDE, "rows": 1, "length": 512},
}

# Chosen afterwards; nothing was changed to suit them.
HELD_OUT: dict[str, dict[str, Any]] = {
    "llama tiny lora fp32, 12×384": {"model": "llama-tiny", "length": 384, "rows": 12},
    "llama tiny full bf16, 6×384": {"model": "llama-tiny", "length": 384, "rows": 6, "adapter": "none", **BF16},
    "llama tiny full fp32, 24×256": {"model": "llama-tiny", "rows": 24, "adapter": "none"},
    "tiny lora bf16, 20×384": {"model": "qwen2-tiny", "length": 384, "rows": 20, **BF16},
    "small lora bf16, 5×384": {"length": 384, "rows": 5, **BF16},
    "small full bf16, 12×256": {"rows": 12, "adapter": "none", **BF16},
    "small full bf16, 3×768": {"length": 768, "rows": 3, "adapter": "none", **BF16},
    "small lora fp32, 3×768 packed": {"length": 768, "rows": 3, "packing": True},
    "small full fp32, 6×384, checkpointing": {"length": 384, "rows": 6, "adapter": "none", "checkpointing": True},
    "small dora fp32, 4×512": {"length": 512, "rows": 4, "lora": DORA},
    "llama tiny dora fp32, 12×384": {"model": "llama-tiny", "length": 384, "rows": 12, "lora": DORA},
    "small dora bf16, 12×256": {"rows": 12, "lora": DORA, **BF16},
    "qwen3_5 tiny lora bf16, 6×384": {"model": "qwen3_5-tiny", "length": 384, "rows": 6, **BF16},
}


def changed(name: str, changes: dict[str, int], folder: Path) -> Path:
    """A builtin model in other sizes, with fresh weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from halftune.model.builtin import materialize

    config = AutoConfig.from_pretrained(materialize(name))
    config.update(changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(materialize(name)).save_pretrained(folder)
    return folder


def recipe(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration of a case: plain text cut into rows of exactly the planned length."""
    adapter = case.get("adapter", "lora")
    model = f"builtin:{case.get('model', 'qwen2-small')}"
    if "changes" in case:
        model = str(changed(case["model"], case["changes"], folder.parent / "model"))
    return {
        "model": {"name_or_path": model},
        "precision": case.get("precision", "fp32"),
        "attention": case.get("attention", "auto"),
        "adapter": adapter if adapter == "none" else {"type": "lora", **case.get("lora", {})},
        "method": "pretrain",
        "data": {
            "train": "builtin:stdlib-text",
            "max_length": case.get("length", 256),
            "packing": case.get("packing", False),
        },
        "training": {
            "output_dir": str(folder),
            "max_steps": 3,
            "per_device_train_batch_size": case.get("rows", 8),
            "gradient_accumulation_steps": case.get("accumulation", 1),
            "gradient_checkpointing": case.get("checkpointing", False),
            "save_steps": "end",
        },
    }


def measure(case: dict[str, Any]) -> tuple[dict[str, int], int]:
    """The plan's memory (bytes by part) and the peak resident memory of the training process in bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        file, folder = Path(scratch) / "case.yaml", Path(scratch) / "run"
        file.write_text(json.dumps(recipe(case, folder)))  # JSON is YAML
        command = [sys.executable, "-m", "halftune", "train", "--config", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(f"{file.read_text()}\n{done.stderr[-2000:]}")
        plan = json.loads((folder / "plan.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return plan["memory"], max(line["memory_bytes"] for line in lines if "memory_bytes" in line)


def main() -> None:
    """Prints one row per case and the mean and worst error."""
    words = [word for word in sys.argv[1:] if word != "--held-out"]
    cases = HELD_OUT if "--held-out" in sys.argv else CASES
    chosen = {name: case for name, case in cases.items() if not words or any(word in name for word in words)}
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "overhead")
    print(f"| case | {' | '.join(parts)} | estimate | measured | error |")
    print("|---" * (len(parts) + 4) + "|")
    errors = []
    for name, case in chosen.items():
        memory, peak = measure(case)
        errors.append(memory["total"] / peak - 1)
        cells = [f"{memory[part] / 2**20:.0f}" for part in parts]
        numbers = f"{memory['total'] / 2**20:.0f} | {peak / 2**20:.0f} | {errors[-1]:+.0%}"
        print(f"| {name} | {' | '.join(cells)} | {numbers} |", flush=True)
    mean = sum(map(abs, errors)) / len(errors)
    print(f"\nMiB. Mean absolute error {mean:.0%}, from {min(errors):+.0%} to {max(errors):+.0%}.")


if __name__ == "__main__":
    main()
