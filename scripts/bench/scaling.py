"""How one step is shared by 1 to 4 processes on this machine: speed, memory, and the bytes that are really sent.

  python scripts/bench/scaling.py              one step, in Markdown
  python scripts/bench/scaling.py --loading    memory of a process while a bf16 model of 300 M parameters is read
  python scripts/bench/scaling.py --rounding   how far bf16 is from fp32 with one process and with two, loss curves

The global batch is the same throughout. Bytes are counted from the collectives that torch issues in one step, gradient
norm and loss included, beside what formulas say of the same tensors. While a model is read, memory is the process's
own (RssAnon): pages of files are everybody's.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import clock, forked, head, no_plots, planned, read_lines, row, tiny_model, write_lines
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halftune.train import setup
from halftune.train.loop.step import finish_step, start_step
from halftune.train.parallel import make_strategy
from halftune.train.parallel.processes import make_accelerator
from halftune.train.run_folder.start_or_resume import RunFolder
from halftune.train.trainer import train

ROWS, LENGTH, STEPS = 12, 128, 3
ADAPTERS: dict[str, Any] = {"full": "none", "lora": {"type": "lora", "rank": 8}}
LARGE = {"hidden_size": 1024, "intermediate_size": 2752, "num_attention_heads": 16, "vocab_size": 32000}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
WAYS = {"exact": ("fp32", 1), "one": ("bf16", 1), "two": ("bf16", 2)}  # name → precision, processes


def all_reduced(size: float, processes: int) -> float:
    """Bytes that each process of a ring sends to sum ``size`` bytes: a reduce-scatter and an all-gather."""
    return 2 * gathered(size, processes)


def gathered(size: float, processes: int) -> float:
    """Bytes that each process of a ring sends to gather (or to reduce and scatter) ``size`` bytes in all."""
    return size * (processes - 1) / processes


# What a process sends of a tensor in a ring, by the name of torch's operator; the tensor is the whole one.
REDUCING = ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_")
GATHERING = ("_allgather_base_", "_reduce_scatter_base_", "all_gather_into_tensor", "reduce_scatter_tensor")


class Counted(TorchDispatchMode):
    """Counts bytes of the collectives that are issued inside, those of autograd's threads and of DDP included."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.processes, self.calls, self.sent = processes, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "barrier"):
            sizes = [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if name in REDUCING:
                sent = all_reduced(sum(sizes), self.processes)
            elif name in GATHERING:  # input and output are given, but for the output of one; the larger is the whole
                whole = max(sizes) * (self.processes if name == "all_gather_into_tensor" else 1)
                sent = gathered(whole, self.processes)
            else:
                raise NotImplementedError(f"what a ring sends in {name} is not known here")
            self.calls, self.sent = self.calls + 1, self.sent + round(sent)
        return func(*args, **(kwargs or {}))


def expected(model: torch.nn.Module, strategy: str, processes: int) -> float:
    """Bytes that a process sends in one step by the formulas: gradients summed, or weights gathered, too."""
    weights = {id(weight): weight for weight in model.parameters()}.values()
    trained = sum(weight.numel() * weight.element_size() for weight in weights if weight.requires_grad)
    if strategy == "ddp":
        return all_reduced(trained, processes)
    everything = sum(weight.numel() * weight.element_size() for weight in weights)
    layers = sum(w.numel() * w.element_size() for name, w in model.named_parameters() if ".layers." in name)
    # What is outside of the layers stays gathered from the forward to the backward pass.
    return gathered(everything + layers + trained, processes)


def run(method: str, strategy: str, processes: int) -> list[dict[str, Any]]:
    """What each process of one case reports."""
    training = {"output_dir": "run", "max_steps": 100, "save_steps": "end"}
    tree = {
        "model": {"name_or_path": "builtin:qwen2-tiny"},
        "precision": "fp32",
        "method": "pretrain",
        "adapter": ADAPTERS[method],
        "data": {"train": "builtin:stdlib-text", "max_length": LENGTH, "packing": False},
        "distributed": {"strategy": strategy},
        "training": {**training, "per_device_train_batch_size": ROWS // processes},
        "logging": {"progress": False},
    }
    with tempfile.TemporaryDirectory() as name:
        return forked(processes, lambda _: measure(tree, processes, Path(name)))


def measure(tree: dict[str, Any], processes: int, folder: Path) -> dict[str, Any]:
    """One process of a run: trains a few steps."""
    torch.set_num_threads(1)
    loaded, plan = planned(tree, folder / "recipe.yaml", processes=processes)
    run = setup.build(loaded, plan, RunFolder(folder, None, finished=False))
    model, steps = run.model, run.feed.steps(0, 100)
    for _ in range(2):  # after the first, DDP orders its buckets anew
        finish_step(run, start_step(run, next(steps)[1]))
    with Counted(processes) as counted:
        finish_step(run, start_step(run, next(steps)[1]))
    seconds, tokens = [], 0
    for _ in range(STEPS):
        batches, began = next(steps)[1], clock()
        tokens = finish_step(run, start_step(run, batches)).tokens
        seconds.append(clock() - began)
    moments = (value for state in run.optimizer.state.values() for value in state.values())
    gradients = (weight for weight in model.parameters() if weight.requires_grad)
    held = sum(local(tensor) for tensor in (*model.parameters(), *moments, *gradients) if torch.is_tensor(tensor))
    formula = expected(model, plan.distribution.value, processes) if processes > 1 else 0.0
    numbers = {"seconds": statistics.median(seconds), "tokens": tokens, "held": held, "expected": formula}
    return {**numbers, "sent": counted.sent, "calls": counted.calls}


def local(tensor: torch.Tensor) -> int:
    """Bytes of this process."""
    return (tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor).nbytes


def measured() -> Iterator[str]:
    """The table of this machine in Markdown, line by line."""
    columns = ("strategy", "processes", "tokens per CPU-second", "MiB held", "collectives", "MiB sent", "by formula")
    yield head("method", *columns)
    shared = [("auto", 1), *((name, size) for size in (2, 3, 4) for name in ("ddp", "fsdp2"))]
    for method, (strategy, processes) in product(ADAPTERS, shared):
        told = run(method, strategy, processes)
        first, speed = told[0], told[0]["tokens"] / sum(one["seconds"] for one in told)
        sent, formula = (f"{first[key] / 2**20:.2f}" for key in ("sent", "expected"))
        held = f"{max(one['held'] for one in told) / 2**20:.1f}"
        shown = "—" if processes == 1 else strategy
        yield row(method, shown, processes, f"{speed:,.0f}", held, first["calls"], sent, formula)


class Peak:
    """The most memory of its own that this process has had while it is open, in bytes above what it began with."""

    def __enter__(self) -> Peak:
        self.began, self.most, self._over = self._own(), 0, threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, self._own() - self.began)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()

    @staticmethod
    def _own() -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


def loading() -> Iterator[str]:
    """Memory while a model is read and shared by FSDP2: each process its rows, or each all of it."""
    yield head("method", "processes", "each reads", "MiB held after", "MiB at most", "CPU-seconds")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        forked(1, lambda _: write_large(folder / "model"))  # in a process of its own, whose memory goes with it
        for (method, precision), processes, whole in product(
            (("full", "fp32"), ("lora", "bf16")), (2, 4), (True, False)
        ):
            tree = {
                "model": {"name_or_path": str(folder / "model")},
                "precision": precision,
                "adapter": ADAPTERS[method],
                "data": {"train": "builtin:stdlib-text", "max_length": 128, "packing": False},
                "distributed": {"strategy": "fsdp2"},
                "training": {"output_dir": "run"},
            }
            told = forked(processes, lambda _, tree=tree, n=processes, all_=whole: read(tree, folder, n, all_))
            held, most, seconds = (max(column) for column in zip(*told, strict=True))
            what = "all of it" if whole else "its rows"
            sizes = (f"{held / 2**20:,.0f}", f"{most / 2**20:,.0f}", f"{seconds:.1f}")
            yield row(f"{method}, {precision}", processes, what, *sizes)


def write_large(folder: Path) -> None:
    """A checkpoint in bf16 with 18 layers of 12.6 M parameters, in files of 200 MB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=18, **LARGE)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200MB")


def read(tree: dict[str, Any], folder: Path, processes: int, whole: bool) -> tuple[int, int, float]:
    """One process: makes the model and shards it; bytes held, bytes at most, CPU-seconds."""
    torch.set_num_threads(1)
    loaded, plan = planned(tree, folder / "recipe.yaml", "cpu-amx", processes)
    accelerator = make_accelerator(plan)
    if whole:
        setup.needs_whole_weights = lambda _config: "to compare"
    strategy, began = make_strategy(accelerator, plan), clock()
    with Peak() as peak:
        model, unread = setup.make_model(loaded.run, plan)
        strategy.place(model, unread)
        strategy.wrap(model, unread)
    return sum(local(one) for one in model.parameters()), peak.most, clock() - began


def rounding(seeds: int) -> Iterator[str]:
    """Root mean square over steps and seeds of the relative difference from the curve in fp32 by one process."""
    kinds = {"LoRA": {"type": "lora", "rank": 4}, "full": "none", "hybrid": "none"}
    draw = random.Random(7)
    sums = [[draw.randint(1, 99) for _ in range(draw.randint(2, 6))] for _ in range(64)]
    with tempfile.TemporaryDirectory() as name:
        room, curves = Path(name), {}
        tiny_model(room / "model", **SMALL, initializer_range=0.1)
        write_lines(room / "rows.jsonl", [{"prompt": f"Add {one}.", "completion": f"{sum(one)}"} for one in sums])
        for kind, seed, (way, (precision, processes)) in product(kinds, range(seeds), WAYS.items()):
            hybrid, output = kind == "hybrid", room / f"{kind}-{seed}-{way}"
            training = {"max_steps": 6, "seed": seed, "learning_rate": 1e-3, "save_steps": "end"}
            tree = {
                "model": {"name_or_path": "builtin:qwen3_5-tiny" if hybrid else str(room / "model")},
                "precision": precision,
                "adapter": kinds[kind],
                "data": {"train": str(room / "rows.jsonl"), "max_length": 96, "packing": hybrid},
                "distributed": {"strategy": "auto" if processes == 1 else "fsdp2"},
                "training": {**training, "output_dir": str(output), "per_device_train_batch_size": 8 // processes},
                "logging": {"progress": False},
            }
            forked(processes, lambda _, tree=tree, n=processes: curve(tree, room, n))
            curves[kind, seed, way] = [line["loss"] for line in read_lines(output / "metrics.jsonl") if "loss" in line]
    yield head("method", "one process", "two, FSDP2")
    for kind in kinds:
        cells = []
        for way in ("one", "two"):
            both = [(curves[kind, seed, way], curves[kind, seed, "exact"]) for seed in range(seeds)]
            pairs = [pair for one, exact in both for pair in zip(one, exact, strict=True)]
            cells.append(f"{math.sqrt(statistics.mean((loss / exact - 1) ** 2 for loss, exact in pairs)):.1e}")
        yield row(kind, *cells)


def curve(tree: dict[str, Any], room: Path, processes: int) -> None:
    """One process of a run that leaves its losses in its folder."""
    no_plots()
    torch.set_num_threads(1)
    train(*planned(tree, room / "recipe.yaml", "cpu-amx", processes))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loading", action="store_true")
    parser.add_argument("--rounding", action="store_true")
    parser.add_argument("--seeds", type=int, default=4, help="of --rounding")
    asked = parser.parse_args()
    for line in loading() if asked.loading else rounding(asked.seeds) if asked.rounding else measured():
        print(line, flush=True)


if __name__ == "__main__":
    main()
