"""What a process of several takes of main memory while a model is read and shared: each its rows, or each all of it.

  python scripts/bench/loading.py                          2 and 4 processes, 300 M parameters, in Markdown
  python scripts/bench/loading.py --processes "[8]" --layers 24

The model's files are bf16, as most are; with full fine-tuning they are read into fp32, with LoRA they stay as they are.
Counted is memory of the process's own (RssAnon, looked at every 2 ms): pages of files are everybody's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from scaling import METHODS
from transformers import LlamaConfig, LlamaForCausalLM

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve
from halftune.train.parallel import make_strategy, reading
from halftune.train.processes import make_accelerator

RECIPE = """\
model: {{name_or_path: "{model}"}}
precision: {precision}
adapter: {adapter}
data: {{train: "builtin:stdlib-text", max_length: 128, packing: false}}
distributed: {{strategy: fsdp2}}
training: {{output_dir: run}}
"""
PRECISION = {"full": "fp32", "lora": "bf16"}
MIB = 2**20


class Peak:
    """The most memory of its own that this process has had while it is open, in bytes, and what it began with."""

    def __enter__(self) -> Peak:
        self.began = self.most = _own()
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, _own())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()
        self.most, self.after = max(self.most, _own()), _own()


def _own() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def share(rank: int, processes: int, port: int, folder: Path, whole: bool, answers: Any) -> None:
    """One process: makes the model and shards it."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    loaded = load_config(folder / "recipe.yaml")
    plan = resolve(loaded.run, lookup("cpu-amx"), read_model_facts(loaded.run.model), world_size=processes)
    accelerator = make_accelerator(plan)
    if whole:
        reading.needs_whole_weights = lambda _config: "to compare"
    strategy = make_strategy(accelerator, plan)
    began = time.process_time()
    with Peak() as peak:
        model, unread = reading.make_model(loaded.run, plan)
        strategy.place(model, unread)
        strategy.wrap(model, unread)
        seconds = time.process_time() - began
        held = sum(one.to_local().nbytes for one in model.parameters())  # pyright: ignore[reportCallIssue]
    answers.put((held, peak.most - peak.began, peak.after - peak.began, seconds))


def run(folder: Path, processes: int, whole: bool) -> tuple[int, int, int, float]:
    """The largest of each number over all processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    arguments = [(rank, processes, port, folder, whole, answers) for rank in range(processes)]
    children = [context.Process(target=share, args=one) for one in arguments]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise SystemExit("a process failed")
    told = [answers.get() for _ in children]
    return tuple(max(column) for column in zip(*told, strict=True))  # type: ignore[return-value]


def make(folder: Path, layers: int) -> None:
    """A checkpoint in bf16 with ``layers`` layers of 12.6 M parameters, in files of 200 MB."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2752, num_hidden_layers=layers, num_attention_heads=16, vocab_size=32000
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200MB")
    print(f"{sum(one.numel() for one in model.parameters()) / 1e6:.0f} M parameters; the largest matrix "
          f"{max(one.numel() for one in model.parameters()) / 1e6:.0f} M\n")  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=json.loads, default=[2, 4], help="how many, as a JSON list")
    parser.add_argument("--layers", type=int, default=18)
    options = parser.parse_args()
    print("| method | processes | read | MiB held | MiB at most | MiB after | CPU-seconds |")
    print("|---|--:|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as name:
        context = multiprocessing.get_context("fork")
        maker = context.Process(target=make, args=(Path(name) / "model", options.layers))
        maker.start()
        maker.join()
        for method, adapter in METHODS.items():
            text = RECIPE.format(model=f"{name}/model", precision=PRECISION[method], adapter=adapter)
            (Path(name) / "recipe.yaml").write_text(text, encoding="utf-8")
            for processes in options.processes:
                for whole in (True, False):
                    held, most, after, seconds = run(Path(name), processes, whole)
                    numbers = " | ".join(f"{size / MIB:,.0f}" for size in (held, most, after))
                    what = "all of it" if whole else "its rows"
                    print(f"| {method} | {processes} | {what} | {numbers} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
