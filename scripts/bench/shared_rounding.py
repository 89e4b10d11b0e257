"""How far bf16 is from fp32 with one process and with two that share the model: the distance of loss curves.

  python scripts/bench/shared_rounding.py              LoRA, full and hybrid, 4 seeds, 6 steps; Markdown
  python scripts/bench/shared_rounding.py --seeds 8

Root mean square over steps and seeds of the relative difference from the curve in fp32 by one process. A model of
0.3 M parameters (hybrid: the builtin one), 8 rows a step, shared by FSDP2. Processes are forks of this one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import traceback
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import yaml
from kill_test import write_rows
from torch._C._distributed_c10d import TCPStore
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.sections.model import ModelSection
from halftune.hardware.catalogue import lookup
from halftune.model.tokenizer import load_tokenizer
from halftune.plan import resolve
from halftune.train.callbacks.loss_plot import LossPlot
from halftune.train.trainer import train

ROWS, STEPS = 8, 6
METHODS = {"LoRA": {"type": "lora", "rank": 4}, "full": "none", "hybrid": "none"}
WAYS = {"exact": ("fp32", 1), "one": ("bf16", 1), "two": ("bf16", 2)}  # name → precision, processes


def make_model(folder: Path) -> None:
    """A smaller sister of the builtin Qwen2, with logits of a usual size."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**BUILTIN_MODELS["qwen2-tiny"], **sizes, "initializer_range": 0.1})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer(ModelSection(name_or_path="builtin:qwen2-tiny")).save_pretrained(folder)


def recipe(room: Path, method: str, seed: int, way: str) -> tuple[Any, Any]:
    """The loaded configuration of one curve, and its plan."""
    precision, processes = WAYS[way]
    tree = {
        "model": {"name_or_path": "builtin:qwen3_5-tiny" if method == "hybrid" else str(room / "model")},
        "precision": precision,
        "adapter": METHODS[method],
        "data": {"train": str(room / "rows.jsonl"), "max_length": 96, "packing": method == "hybrid"},
        "distributed": {"strategy": "auto" if processes == 1 else "fsdp2"},
        "training": {
            "output_dir": str(room / f"{method}-{seed}-{way}"),
            "max_steps": STEPS,
            "seed": seed,
            "per_device_train_batch_size": ROWS // processes,
            "learning_rate": 1e-3,
            "save_steps": "end",
        },
        "logging": {"progress": False, "report_to": []},
    }
    path = room / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    loaded = load_config(path)
    facts = read_model_facts(loaded.run.model)
    return loaded, resolve(loaded.run, lookup("cpu-amx"), facts, world_size=processes)


def train_all(recipes: list[tuple[Any, Any]], processes: int) -> None:
    """Trains one after the other in so many forks of this process.

    Raises:
        SystemExit: one of them fails.
    """
    reader, writer = os.pipe()
    children = []
    for rank in range(processes):
        if child := os.fork():
            children.append(child)
            continue
        try:
            port = os.read(reader, 5).decode()
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
            names |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
            os.environ.update({name: str(value) for name, value in names.items()})
            LossPlot._draw = lambda *_: None  # type: ignore[method-assign,assignment]
            for loaded, plan in recipes:
                train(loaded, plan)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, f"{store.port:05d}".encode() * processes)
    if sum(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit("a process failed")


def curve(room: Path, method: str, seed: int, way: str) -> list[float]:
    """Losses of a run, step by step."""
    text = (room / f"{method}-{seed}-{way}" / "metrics.jsonl").read_text(encoding="utf-8")
    return [line["loss"] for line in map(json.loads, text.splitlines()) if "loss" in line]


def main() -> None:
    """Trains every curve and prints the distances."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    seeds = range(parser.parse_args().seeds)
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        make_model(room / "model")
        write_rows(room / "rows.jsonl")
        for processes in (1, 2):
            ways = [way for way, (_, number) in WAYS.items() if number == processes]
            train_all([recipe(room, *case) for case in product(METHODS, seeds, ways)], processes)
        print("| method | one process | two, FSDP2 |\n|---|--:|--:|")
        for method in METHODS:
            cells = []
            for way in ("one", "two"):
                squares = [
                    (loss / exact - 1) ** 2
                    for seed in seeds
                    for loss, exact in zip(*(curve(room, method, seed, each) for each in (way, "exact")), strict=True)
                ]
                cells.append(f"{math.sqrt(sum(squares) / len(squares)):.1e}")
            print(f"| {method} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
