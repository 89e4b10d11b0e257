"""How far the plan's memory estimate is from reality: trains the builtin models on the CPU and reads the peak RSS.

  python scripts/bench/memory_estimate.py              every case of memory_cases.yaml, a Markdown table on stdout
  python scripts/bench/memory_estimate.py full lora    the cases whose name contains one of these words
  python scripts/bench/memory_estimate.py --held-out   cases that the estimate's constants were not fitted to

Each case is a process of its own that trains three steps (the optimizer's states exist from the second on) on plain
text cut into rows of exactly the planned length.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from harness import head, read_lines, row

CASES = Path(__file__).with_name("memory_cases.yaml")
RECIPE = """\
model: {name_or_path: "builtin:qwen2-small"}
precision: fp32
method: pretrain
data: {train: "builtin:stdlib-text", max_length: 256, packing: false}
training:
  {output_dir: run, max_steps: 3, per_device_train_batch_size: 8, gradient_checkpointing: false, save_steps: end}
"""
WIDE = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128)
WIDE |= {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "hidden_size": 512}
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "overhead")


def write_wide(folder: Path) -> None:
    """The builtin Qwen3.5 in other sizes, with fresh weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from halftune.model.files.builtin import materialize

    config = AutoConfig.from_pretrained(materialize("qwen3_5-tiny"))
    config.update(WIDE)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(materialize("qwen3_5-tiny")).save_pretrained(folder)


def measure(case: dict[str, Any]) -> tuple[dict[str, int], int]:
    """The plan's memory (bytes by part) and the peak resident memory of the training process in bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.get("model.name_or_path") == "wide":
            write_wide(folder / "wide")
        (folder / "recipe.yaml").write_text(RECIPE)
        words = [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in case.items()]
        command = [sys.executable, "-m", "halftune", "train", "--config", "recipe.yaml", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{case}\n{done.stderr[-2000:]}")
        plan, lines = json.loads((folder / "run/plan.json").read_text()), read_lines(folder / "run/metrics.jsonl")
        return plan["memory"], max(line["memory_bytes"] for line in lines if "memory_bytes" in line)


def main() -> None:
    """Prints one row per case and the mean and worst error."""
    words = [word for word in sys.argv[1:] if word != "--held-out"]
    cases = yaml.safe_load(CASES.read_text())["held-out" if "--held-out" in sys.argv else "fitted"]
    print(head("case", *PARTS, "estimate", "measured", "error"))
    errors = []
    for name, case in cases.items():
        if not words or any(word in name for word in words):
            memory, peak = measure(case)
            errors.append(memory["total"] / peak - 1)
            sizes = [f"{size / 2**20:.0f}" for size in (*(memory[part] for part in PARTS), memory["total"], peak)]
            print(row(name, *sizes, f"{errors[-1]:+.0%}"), flush=True)
    mean = sum(map(abs, errors)) / len(errors)
    print(f"\nMiB. Mean absolute error {mean:.0%}, from {min(errors):+.0%} to {max(errors):+.0%}.")


if __name__ == "__main__":
    main()
