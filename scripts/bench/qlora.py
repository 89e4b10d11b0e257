"""LoRA on quantised weights, and 8-bit optimizer state, beside LoRA in bf16: losses, memory, merge, resume.

  python scripts/bench/qlora.py --data alpaca.json [--steps 100]         Markdown tables on stdout

The base is builtin:qwen2-small, trained in full on half of the rows. Then every side trains the same LoRA adapter on
the other half, with the same seed, order and batches. The rows are conversations or instructions.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from harness import cpu_seconds, head, machine, read_lines, row

HELD_OUT = 64
# side → what it changes
SIDES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "nf4": {"model.quantization": "nf4"},
    "nf4, quantised before": {"model.name_or_path": "quantised"},
    "int8": {"model.quantization": "int8"},
    "bf16, adamw_8bit": {"training.optim": "adamw_8bit"},
    "bf16, all weights": {"adapter": "none", "training.learning_rate": 1e-4},
    "bf16, all weights, adamw_8bit": {
        "adapter": "none",
        "training.learning_rate": 1e-4,
        "training.optim": "adamw_8bit",
    },
}
# side → the side with which its losses are compared
BESIDE = dict.fromkeys(SIDES, "bf16") | {"bf16, all weights, adamw_8bit": "bf16, all weights"}
RECIPE = """\
model: {name_or_path: base}
precision: bf16
adapter: {type: lora, rank: 16, alpha: 32, target_modules: all-linear}
data: {train: second.json, eval: held-out.json, max_length: 256}
training:
  per_device_train_batch_size: 8
  learning_rate: 1.0e-3
  lr_scheduler_type: constant
  eval_steps: 10
  output_dir: run
"""


def trained(folder: Path, *words: str) -> float:
    """Train the recipe with changes; CPU-seconds.

    Raises:
        SystemExit: it fails.
    """
    seconds = cpu_seconds([sys.executable, "-m", "halftune", "train", "--config", "recipe.yaml", *words], folder)
    output = next(word.partition("=")[2] for word in words if word.startswith("training.output_dir"))
    if not (folder / output / "final").is_dir():
        sys.exit(f"{' '.join(words)} failed")
    return seconds


def quantise(base: Path, folder: Path) -> None:
    """Save a model in nf4 with transformers, as others publish it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    AutoModelForCausalLM.from_pretrained(base, quantization_config=config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)


def losses(folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Training and evaluation losses by step."""
    lines = read_lines(folder / "metrics.jsonl")
    return tuple({line["step"]: line[key] for line in lines if line.get(key)} for key in ("loss", "eval_loss"))  # type: ignore[return-value]


def resumed(folder: Path, words: list[str], output: str) -> bool:
    """Whether a run that goes on from its middle ends with the bits of the whole one."""
    again = folder / "again"
    shutil.copytree(folder / output, again)
    newest = max(again.glob("checkpoint-*"), key=lambda one: int(one.name.partition("-")[2]))
    shutil.rmtree(again / "final")
    shutil.rmtree(newest)
    trained(folder, *words, "training.output_dir=again")
    weights = (
        "adapter_model.safetensors" if (again / "final" / "adapter_model.safetensors").exists() else "model.safetensors"
    )
    same = (again / "final" / weights).read_bytes() == (folder / output / "final" / weights).read_bytes()
    shutil.rmtree(again)
    return same


def merged(folder: Path, output: str) -> str:
    """What ``halftune export`` says of the merge: its error relative to the unmerged model."""
    from halftune.export.merged import export_run
    from halftune.model.result.completed_run import open_run

    with chdir(folder):  # paths of the run are relative
        done = export_run(open_run(output), Path(f"{output}-merged")).merge
    return "–" if done is None else f"{done.forward_error:.1e}"


def measure(folder: Path, name: str, number: int, steps: int) -> dict[str, Any]:
    """Train one side."""
    output = f"side-{number}"
    words = [f"{key}={value}" for key, value in SIDES[name].items()]
    words += [f"training.max_steps={steps}", f"training.save_steps={steps // 2}"]
    seconds = trained(folder, *words, f"training.output_dir={output}")
    plan = json.loads((folder / output / "plan.json").read_text())
    training, evaluation = losses(folder / output)
    return {
        "loss": training,
        "eval": evaluation,
        "seconds": seconds,
        "peak": max(
            line["memory_bytes"] for line in read_lines(folder / output / "metrics.jsonl") if "memory_bytes" in line
        ),
        "plan": plan["memory"],
        "same": resumed(folder, words, output),
        "merge": merged(folder, output),
    }


def main() -> None:
    """Train the base and all sides; print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="rows, a JSON list")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--base-steps", type=int, default=300)
    asked = parser.parse_args()
    rows = json.loads(asked.data.read_text(encoding="utf-8"))
    half = (len(rows) - HELD_OUT) // 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {
            "held-out": rows[:HELD_OUT],
            "first": rows[HELD_OUT : HELD_OUT + half],
            "second": rows[HELD_OUT + half :],
        }
        for part, some in parts.items():
            (folder / f"{part}.json").write_text(json.dumps(some))
        (folder / "recipe.yaml").write_text(RECIPE)
        base = (
            "model.name_or_path=builtin:qwen2-small",
            "adapter=none",
            "data.train=first.json",
            "training.learning_rate=3e-4",
        )
        trained(
            folder,
            *base,
            f"training.max_steps={asked.base_steps}",
            "training.save_steps=end",
            "training.output_dir=base-run",
        )
        shutil.copytree(folder / "base-run" / "final", folder / "base")
        quantise(folder / "base", folder / "quantised")
        found = {side: measure(folder, side, number, asked.steps) for number, side in enumerate(SIDES)}
    print(f"{machine()}; {asked.steps} steps on {asked.data.name}\n")
    columns = ("first", "middle", "last", "off by", "CPU-s", "peak", "planned", "merge", "resume")
    print(head("side", *columns))
    for side, one in found.items():
        course = list(one["eval"].values())
        other = found[BESIDE[side]]["loss"]
        off = statistics.mean(abs(one["loss"][step] - other[step]) / other[step] for step in other)
        total = one["plan"]["total"]
        shown = (f"{value:.3f}" for value in (course[0], course[len(course) // 2], course[-1]))
        sizes = (f"{value / 2**20:,.0f} MiB" for value in (one["peak"], total))
        same = "same bits" if one["same"] else "OTHER BITS"
        print(row(side, *shown, f"{off:.2%}", f"{one['seconds']:.0f}", *sizes, one["merge"], same))


if __name__ == "__main__":
    main()
