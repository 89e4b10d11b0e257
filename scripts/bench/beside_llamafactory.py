"""DPO beside LLaMA-Factory, on the same pairs: pairs per CPU-second, and peak memory above the process after imports.

  python scripts/bench/beside_llamafactory.py --python /elsewhere/bin/python     Markdown table on stdout

LLaMA-Factory has an environment of its own, whose Python is named. Models, pairs and settings are those of
``beside_trl.py``; fp32, LoRA on all linear layers, no gradient checkpointing, the reference is the model without its
adapter. Every case is a process of its own; the frameworks take turns, and the table holds medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from beside_trl import LENGTH, MODELS, OURS, ROLES, VOCABULARIES, ours, peak_above, prepare
from harness import case, clock, head, read_lines, row, write_lines

THEIRS = "LLaMA-Factory"
NAMES = {"user": "human", "assistant": "gpt"}


def theirs(folder: Path, pairs: int, steps: int) -> dict[str, float]:
    """LLaMA-Factory, in its own Python."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DISABLE_VERSION_CHECK": "1", "FORCE_TORCHRUN": "0"}
    from llamafactory.train.dpo import workflow  # type: ignore[import-not-found]  # noqa: F401  as beside_trl: imports
    from llamafactory.train.tuner import run_exp  # type: ignore[import-not-found]
    from transformers import TrainerCallback

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.append(clock())

    before = psutil.Process().memory_info().rss
    settings = {
        "stage": "dpo",
        "do_train": True,
        "model_name_or_path": str(folder / "model"),
        "finetuning_type": "lora",
        "lora_target": "all",
        "lora_rank": 8,
        "lora_alpha": 16,
        "pref_beta": 0.1,
        "dataset": "pairs",
        "dataset_dir": str(folder),
        "template": "qwen",
        "cutoff_len": LENGTH,
        "output_dir": str(folder / "run"),
        "max_steps": 1 + steps,
        "per_device_train_batch_size": pairs,
        "disable_gradient_checkpointing": True,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    run_exp(settings, [Clock()])
    return {"speed": pairs * steps / (times[-1] - times[0]), "peak": peak_above(before)}


def write_pairs(folder: Path) -> None:
    """The pairs of ``rows.jsonl`` as LLaMA-Factory reads them."""
    rows = []
    for one in read_lines(folder / "rows.jsonl"):
        said = {key: [{"from": NAMES[role], "value": one[key][0]["content"]}] for key, role in ROLES.items()}
        rows.append({"conversations": said["prompt"], "chosen": said["chosen"][0], "rejected": said["rejected"][0]})
    write_lines(folder / "pairs.jsonl", rows)
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    known = {"pairs": {"file_name": "pairs.jsonl", "formatting": "sharegpt", "ranking": True, "columns": columns}}
    (folder / "dataset_info.json").write_text(json.dumps(known), encoding="utf-8")


def main() -> int:
    """Measures, or is one case."""
    if (words := case()) is not None:
        name, folder, pairs, steps = words[0], Path(words[1]), int(words[2]), int(words[3])
        print(json.dumps(ours(folder, "dpo", pairs, steps) if name == OURS else theirs(folder, pairs, steps)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of the environment that has LLaMA-Factory")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=tuple(MODELS))
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--pairs", type=int, default=8, help="of a step (default 8)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    columns = ("vocabulary", f"pairs / CPU-s, {OURS}", THEIRS, "ratio", f"peak GiB, {OURS}", THEIRS, "ratio")
    print(head("model", *columns))
    for size, vocabulary in itertools.product(asked.models, asked.vocabularies):
        found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
        for _ in range(asked.rounds):
            for name, results in found.items():
                with tempfile.TemporaryDirectory() as folder:
                    prepare(Path(folder), "dpo", size, vocabulary, asked.pairs * (asked.steps + 1))
                    write_pairs(Path(folder))
                    python = sys.executable if name == OURS else asked.python
                    words = ["--case", name, folder, str(asked.pairs), str(asked.steps)]
                    done = subprocess.run([python, __file__, *words], capture_output=True, text=True, check=False)
                if done.returncode:
                    print(name, done.stderr[-2000:], file=sys.stderr)
                    return 1
                results.append(json.loads(done.stdout.splitlines()[-1]))
        speed, peak = (
            [statistics.median(one[key] for one in results) for results in found.values()] for key in ("speed", "peak")
        )
        speeds, peaks = (f"{one:.3g}" for one in speed), (f"{one / 2**30:.2f}" for one in peak)
        cells = (*speeds, f"{speed[0] / speed[1]:.2f}", *peaks, f"{peak[0] / peak[1]:.2f}")
        print(row(size, f"{vocabulary:,}", *cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
