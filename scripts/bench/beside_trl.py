"""DPO and distillation beside TRL, on the same rows: real tokens per CPU-second, and peak memory above the process
after its imports.

  python scripts/bench/beside_trl.py                                    Markdown table on stdout, of DPO
  python scripts/bench/beside_trl.py --method distill                   of distillation, beside TRL's GKD
  python scripts/bench/beside_trl.py --vocabularies 4096 --rounds 1     a small part of it

3 M parameters, fp32, LoRA on all linear layers. The reference of DPO is the model without its adapter; the teacher of
distillation is a frozen model with 256 instead of 192 channels, and TRL samples no answers (lmbda 0). Both frameworks
apply the same chat template to texts of 600 characters, and take their defaults for the rest: halftune packs examples,
TRL pads them. Every case is a process of its own; the frameworks take turns, and the table holds medians over the
rounds.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from harness import case, clock, fresh, head, planned, row, tiny_model, write_lines

OURS, THEIRS = "halftune", "TRL"
LENGTH, CHARACTERS, VOCABULARIES = 512, 600, (4_096, 152_000)
ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}


def measured(framework: str, method: str, pairs: int, vocabulary: int, steps: int) -> dict[str, float]:
    """One case, in this process."""
    from halftune.data.builtin import builtin_rows

    texts = [one["text"] for one in builtin_rows("stdlib-text").rows if len(one["text"]) >= 2 * CHARACTERS]
    rows = []
    for one, other in list(pairwise(texts))[: pairs * (steps + 1)]:
        said = {"prompt": one[:CHARACTERS], "chosen": one[CHARACTERS:], "rejected": other[CHARACTERS:]}
        turns = {key: [{"role": role, "content": said[key][:CHARACTERS]}] for key, role in ROLES.items()}
        rows.append(turns if method == "dpo" else {"messages": turns["prompt"] + turns["chosen"]})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model(folder / "model", vocab_size=vocabulary)
        tiny_model(folder / "teacher", vocab_size=vocabulary, hidden_size=256, intermediate_size=1024)
        write_lines(folder / "rows.jsonl", rows)
        return (ours if framework == OURS else trl)(folder, method, pairs, steps)


def peak_above(before: int) -> int:
    """Bytes of the process's peak above ``before``."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def ours(folder: Path, method: str, pairs: int, steps: int) -> dict[str, float]:
    """halftune, as ``halftune bench`` measures it."""
    from halftune.bench.measured import measure

    recipe = {
        "model": {"name_or_path": str(folder / "model")},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 8, "alpha": 16},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": LENGTH},
        "method": {"type": method} | ({} if method == "dpo" else {"teacher": str(folder / "teacher"), "beta": 0.5}),
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 1_000_000,
            "per_device_train_batch_size": pairs,
            "gradient_checkpointing": False,
            "save_steps": "end",
        },
        "logging": {"progress": False},
    }
    planned(recipe, folder / "recipe.yaml")
    import peft  # noqa: F401  what the loop imports is no memory of the step

    before = psutil.Process().memory_info().rss
    found = measure({"config": str(folder / "recipe.yaml"), "overrides": [], "warm_up": 1, "steps": steps})
    return {"speed": found["real_per_cpu_second"], "peak": peak_above(before)}


def trainer_of(method: str, folder: Path, more: dict[str, Any]) -> Any:
    """TRL's trainer of a method, with the settings in ``more``."""
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    settings = more.pop("args")
    if method == "dpo":
        return DPOTrainer(args=DPOConfig(**settings), **more)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype="float32")
    return GKDTrainer(teacher_model=teacher, args=GKDConfig(lmbda=0.0, beta=0.5, temperature=1.0, **settings), **more)


def trl(folder: Path, method: str, pairs: int, steps: int) -> dict[str, float]:
    """TRL."""
    import datasets
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    datasets.disable_progress_bars()
    tokens: list[int] = []  # of each batch; the loader reads one ahead
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.append(clock())

    before = psutil.Process().memory_info().rss
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
    config = {
        "output_dir": str(folder / "run"),
        "max_steps": 1 + steps,
        "per_device_train_batch_size": pairs,
        "max_length": LENGTH,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    given = {
        "model": model,
        "args": config,
        "train_dataset": datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train"),
        "processing_class": AutoTokenizer.from_pretrained(folder / "model"),
        "peft_config": LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        "callbacks": [Clock()],
    }
    trainer = trainer_of(method, folder, given)
    collate = trainer.data_collator

    def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
        made = collate(rows)
        tokens.append(int(made["attention_mask"].sum()))
        return made

    trainer.data_collator = counted
    trainer.train()
    return {"speed": sum(tokens[1 : len(times)]) / (times[-1] - times[0]), "peak": peak_above(before)}


def main() -> int:
    """Measures, or is one case."""
    if (words := case()) is not None:
        print(json.dumps(measured(words[0], words[1], *map(int, words[2:]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("dpo", "distill"), default="dpo")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--pairs", type=int, default=8, help="rows of a step (default 8)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    columns = (f"tokens / CPU-s, {OURS}", THEIRS, "ratio", f"peak GiB, {OURS}", THEIRS, "ratio")
    print(head("vocabulary", *columns))
    for vocabulary in asked.vocabularies:
        found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
        for _ in range(asked.rounds):
            for name, results in found.items():
                results.append(fresh(name, asked.method, asked.pairs, vocabulary, asked.steps))
                if "note" in results[-1]:
                    print(results[-1]["note"], file=sys.stderr)
                    return 1
        speed, peak = (
            [statistics.median(one[key] for one in results) for results in found.values()] for key in ("speed", "peak")
        )
        speeds, peaks = (f"{one:,.0f}" for one in speed), (f"{one / 2**30:.2f}" for one in peak)
        print(
            row(f"{vocabulary:,}", *speeds, f"{speed[0] / speed[1]:.2f}", *peaks, f"{peak[0] / peak[1]:.2f}"),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
