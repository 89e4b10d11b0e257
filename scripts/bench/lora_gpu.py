"""LoRA at the width of Qwen2.5-7B on one GPU: halftune beside transformers' Trainer with peft, on the same packed rows.

  python scripts/bench/lora_gpu.py                 8 layers, 4,096 tokens a row, bf16: JSON lines, then a table
  python scripts/bench/lora_gpu.py --layers 28     all of them
  python scripts/bench/lora_gpu.py --dry-run       a tiny width in fp32 on the CPU: is the script right?

Random weights, real widths. Rank 16 on all linear layers. Each framework runs in a process of its own, so that its peak
memory is its own. The Trainer is fed position ids and no attention mask. The table also holds what the plan expected.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from growth import packed_rows, pad, write_documents

OURS, PLAIN = "halftune", "Trainer + peft"
WARM_UP, STEPS, ROWS, LENGTH, RANK = 3, 10, 2, 4096, 16
WIDTH = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
DRY = {"num_hidden_layers": 2, "max_position_embeddings": 512}  # of the builtin tiny model


def write_model(folder: Path, layers: int, dry: bool) -> None:
    """A checkpoint of random weights with the tokenizer of the builtin tiny model."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from halftune.config.builtin_models import BUILTIN_MODELS
    from halftune.model.builtin import materialize

    raw = {**BUILTIN_MODELS["qwen2-tiny"], **(DRY if dry else {**WIDTH, "num_hidden_layers": layers})}
    shutil.copytree(materialize("qwen2-tiny"), folder)
    dtype, device = (torch.float32, "cpu") if dry else (torch.bfloat16, "cuda")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), dtype=dtype)
    model.save_pretrained(folder)


def recipe(folder: Path, length: int) -> dict[str, Any]:
    """What halftune trains; the rows are also the Trainer's."""
    return {
        "model": {"name_or_path": str(folder / "model")},
        "adapter": {"type": "lora", "rank": RANK, "alpha": 2 * RANK},
        "data": {"train": str(folder / "documents.jsonl"), "max_length": length, "packing": True},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 1_000_000,
            "per_device_train_batch_size": ROWS,
            "gradient_checkpointing": False,
            "save_steps": "end",
        },
        "logging": {"progress": False},
    }


def child(framework: str, folder: Path) -> dict[str, Any]:
    """One framework's numbers."""
    file = folder / "recipe.yaml"
    return ours(file) if framework == OURS else plain(file)


def ours(file: Path) -> dict[str, Any]:
    """halftune, as ``halftune bench`` measures it, and the memory that its plan expects."""
    from halftune.bench.measured import measure
    from halftune.config.facts.model import read_model_facts
    from halftune.config.load import load_config
    from halftune.hardware.probe import probe
    from halftune.plan import resolve

    loaded = load_config(file)
    plan = resolve(loaded.run, probe(), read_model_facts(loaded.run.model))
    found = measure({"config": str(file), "overrides": [], "warm_up": WARM_UP, "steps": STEPS})
    return {
        "tokens_per_second": found["real_per_second"],
        "mfu": found["mfu"],
        "peak_bytes": found.get("peak_device_bytes", found["peak_rss_bytes"]),
        "expected_bytes": plan.memory.total,
        "attention": found["attention"],
        "compute": found["compute"],
    }


def plain(file: Path) -> dict[str, Any]:
    """transformers' Trainer with peft, SDPA, the weights in their own dtype, bf16 autocast as its users set it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    rows, folder, size = packed_rows(file)
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto").to("cuda" if cuda else "cpu")
    model.config.use_cache = False
    clock: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            clock.append(time.perf_counter())

    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments = TrainingArguments(
        output_dir=str(folder / "plain"), max_steps=WARM_UP + STEPS, per_device_train_batch_size=size, use_cpu=not cuda,
        bf16=cuda, save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
        dataloader_drop_last=True,
    )  # fmt: skip
    adapted = get_peft_model(model, lora)
    Trainer(model=adapted, args=arguments, train_dataset=rows, data_collator=pad, callbacks=[Clock()]).train()  # pyright: ignore[reportArgumentType]
    real = sum(len(row["input_ids"]) for row in rows) / len(rows) * size
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {"tokens_per_second": real * STEPS / (clock[-1] - clock[WARM_UP - 1]), "peak_bytes": peak}


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table, a row for each framework."""
    lines = ["| | tokens / s | peak GiB | plan expects GiB | MFU |", "|---|---:|---:|---:|---:|"]
    for found in results:
        if "note" in found:
            lines.append(f"| {found['framework']} | {found['note']} | – | – | – |")
            continue
        expected, mfu = found.get("expected_bytes"), found.get("mfu")
        cells = [found["framework"], f"{found['tokens_per_second']:,.0f}", f"{found['peak_bytes'] / 2**30:.1f}"]
        cells += [f"{expected / 2**30:.1f}" if expected else "–", f"{mfu:.0%}" if mfu else "–"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measures both frameworks; leaves with 1 if one failed."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], Path(sys.argv[3]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", asked.layers, asked.dry_run)
        write_documents(folder / "documents.jsonl")
        (folder / "recipe.yaml").write_text(json.dumps(recipe(folder, 128 if asked.dry_run else LENGTH)))
        for framework in (OURS, PLAIN):
            command = [sys.executable, __file__, "--child", framework, name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            last = (done.stdout.strip().splitlines() or [""])[-1]
            errors = (done.stderr.strip().splitlines() or ["failed"])[-1]
            found = {"framework": framework, **({"note": errors} if done.returncode else json.loads(last))}
            print(json.dumps(found), file=sys.stderr, flush=True)
            results.append(found)
    print(table(results))
    return int(any("note" in found for found in results))


if __name__ == "__main__":
    sys.exit(main())
