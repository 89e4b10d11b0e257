"""Preference methods and distillation beside TRL, on the same rows: rows (pairs, or rated answers) per CPU-second, and
peak memory above the process after its imports.

  python scripts/bench/beside_trl.py                                    Markdown table on stdout, of DPO
  python scripts/bench/beside_trl.py --method kto                       of another method
  python scripts/bench/beside_trl.py --models tiny --vocabularies 4096 --rounds 1     a small part of it

3 M or 24 M parameters with 4,096 words, fp32, LoRA on all linear layers. The reference of DPO and KTO is the model
without its adapter; the teacher of distillation is a frozen model with 256 instead of 192 channels, and TRL samples no
answers (lmbda 0). The rows of a step are one group of KTO in both frameworks. Both apply the same chat template to
texts of 600 characters, and take their defaults for the rest: halftune packs examples, TRL pads them. Every case is a
process of its own; the frameworks take turns, and the table holds medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import sys
import tempfile
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from harness import case, clock, fresh, head, planned, row, tiny_model, write_lines

OURS, THEIRS = "halftune", "TRL"
LENGTH, CHARACTERS, VOCABULARIES = 512, 600, (4_096, 152_000)
ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
METHODS = ("dpo", "kto", "orpo", "reward", "distill")
MODELS: dict[str, dict[str, int]] = {
    "tiny": {},
    "small": {"hidden_size": 384, "intermediate_size": 2048, "num_hidden_layers": 8},
}


def prepare(folder: Path, method: str, size: str, vocabulary: int, count: int) -> None:
    """Writes ``model``, the teacher where there is one, and ``rows.jsonl``."""
    from halftune.data.sources.builtin import builtin_rows

    texts = [one["text"] for one in builtin_rows("stdlib-text").rows if len(one["text"]) >= 2 * CHARACTERS]
    rows = []
    for one, other in list(pairwise(texts))[:count]:
        said = {"prompt": one[:CHARACTERS], "chosen": one[CHARACTERS:], "rejected": other[CHARACTERS:]}
        turns = {key: [{"role": role, "content": said[key][:CHARACTERS]}] for key, role in ROLES.items()}
        if method == "distill":
            turns = {"messages": turns["prompt"] + turns["chosen"]}
        rows.append(turns)
    if method == "kto":
        kinds = [("chosen", True), ("rejected", False)]
        rows = [{"prompt": row["prompt"], "completion": row[kinds[n % 2][0]], "label": kinds[n % 2][1]}
                for n, row in enumerate(rows)]  # fmt: skip
    tiny_model(folder / "model", vocab_size=vocabulary, **MODELS[size])
    if method == "distill":
        tiny_model(folder / "teacher", vocab_size=vocabulary, hidden_size=256, intermediate_size=1024)
    write_lines(folder / "rows.jsonl", rows)


def measured(framework: str, method: str, size: str, pairs: int, vocabulary: int, steps: int) -> dict[str, float]:
    """One case, in this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, method, size, vocabulary, pairs * (steps + 1))
        return (ours if framework == OURS else trl)(folder, method, pairs, steps)


def peak_above(before: int) -> int:
    """Bytes of the process's peak above ``before``."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def ours(folder: Path, method: str, pairs: int, steps: int) -> dict[str, float]:
    """halftune, as ``halftune bench`` measures it."""
    from halftune.bench.measured import measure

    settings: dict[str, dict[str, Any]] = {
        "distill": {"teacher": str(folder / "teacher"), "beta": 0.5},
        "kto": {"group_size": pairs},
    }
    recipe = {
        "model": {"name_or_path": str(folder / "model")},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 8, "alpha": 16},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": LENGTH},
        "method": {"type": method, **settings.get(method, {})},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 1_000_000,
            "per_device_train_batch_size": 1 if method == "kto" else pairs,
            "gradient_checkpointing": False,
            "save_steps": "end",
        },
        "logging": {"progress": False},
    }
    planned(recipe, folder / "recipe.yaml")
    import peft  # noqa: F401  what the loop imports is no memory of the step

    before = psutil.Process().memory_info().rss
    found = measure({"config": str(folder / "recipe.yaml"), "overrides": [], "warm_up": 1, "steps": steps})
    seconds = sum(one["cpu_seconds"] for one in found["steps"][1:])
    return {"speed": pairs * steps / seconds, "peak": peak_above(before)}


def trainer_of(method: str, folder: Path, more: dict[str, Any]) -> Any:
    """TRL's trainer of a method, with the settings in ``more``."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from transformers import AutoModelForCausalLM

    places = {
        "dpo": ("trl.trainer.dpo_trainer", "trl.trainer.dpo_config", "DPO"),
        "kto": ("trl.trainer.kto_trainer", "trl.trainer.kto_config", "KTO"),
        "reward": ("trl.trainer.reward_trainer", "trl.trainer.reward_config", "Reward"),
        "orpo": ("trl.experimental.orpo", "trl.experimental.orpo", "ORPO"),
        "distill": ("trl.experimental.gkd", "trl.experimental.gkd", "GKD"),
    }
    trainer, config, name = places[method]
    settings = more.pop("args")
    if method == "distill":
        settings |= {"lmbda": 0.0, "beta": 0.5, "temperature": 1.0}
        more["teacher_model"] = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype="float32")
    args = getattr(import_module(config), f"{name}Config")(**settings)
    return getattr(import_module(trainer), f"{name}Trainer")(args=args, **more)


def trl(folder: Path, method: str, pairs: int, steps: int) -> dict[str, float]:
    """TRL."""
    import datasets
    from peft import LoraConfig
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )

    datasets.disable_progress_bars()
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.append(clock())

    before = psutil.Process().memory_info().rss
    scores = method == "reward"
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = kind.from_pretrained(folder / "model", dtype="float32", **({"num_labels": 1} if scores else {}))
    task = "SEQ_CLS" if scores else "CAUSAL_LM"
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
        "peft_config": LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type=task),
        "callbacks": [Clock()],
    }
    trainer_of(method, folder, given).train()
    return {"speed": pairs * steps / (times[-1] - times[0]), "peak": peak_above(before)}


def main() -> int:
    """Measures, or is one case."""
    if (words := case()) is not None:
        print(json.dumps(measured(*words[:3], *map(int, words[3:]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, default="dpo")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=tuple(MODELS))
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--pairs", type=int, default=8, help="rows of a step (default 8)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    columns = ("vocabulary", f"rows / CPU-s, {OURS}", "TRL", "ratio", f"peak GiB, {OURS}", "TRL", "ratio")
    print(head("model", *columns))
    for size, vocabulary in itertools.product(asked.models, asked.vocabularies):
        found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
        for _ in range(asked.rounds):
            for name, results in found.items():
                results.append(fresh(name, asked.method, size, asked.pairs, vocabulary, asked.steps))
                if "note" in results[-1]:
                    print(name, results[-1]["note"], file=sys.stderr)
                    return 1
        speed, peak = (
            [statistics.median(one[key] for one in results) for results in found.values()] for key in ("speed", "peak")
        )
        speeds, peaks = (f"{one:.3g}" for one in speed), (f"{one / 2**30:.2f}" for one in peak)
        cells = (*speeds, f"{speed[0] / speed[1]:.2f}", *peaks, f"{peak[0] / peak[1]:.2f}")
        print(row(size, f"{vocabulary:,}", *cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
