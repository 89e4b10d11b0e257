"""How one step is shared by 1 to 4 processes on this machine: speed, memory, and the bytes that are really sent.

  python scripts/bench/scaling.py              measured here, then on paper for 8, 64 and 512 GPUs, in Markdown
  python scripts/bench/scaling.py --paper      on paper only

The global batch is the same throughout. Bytes are counted from the collectives that torch issues in one step, gradient
norm and loss included, and are compared with what scaling_paper.py's formulas say of the same tensors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from scaling_paper import ETHERNET, all_reduced, gathered, tables
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.hardware.probe import probe
from halftune.plan import resolve
from halftune.train import setup
from halftune.train.step import Stepper

ROWS, LENGTH, STEPS = 12, 128, 3
RECIPE = """\
model: {{name_or_path: "builtin:qwen2-tiny"}}
precision: fp32
method: pretrain
adapter: {adapter}
data: {{train: "builtin:stdlib-text", max_length: {length}, packing: false}}
distributed: {{strategy: {strategy}}}
training: {{output_dir: run, max_steps: 100, per_device_train_batch_size: {rows}, save_steps: end}}
logging: {{progress: false}}
"""
METHODS = {"full": "none", "lora": "{type: lora, rank: 8}"}
# What a process sends of a tensor in a ring, by the name of torch's operator; the tensor is the whole one.
_RINGS = {
    "allreduce_": all_reduced,
    "allreduce_coalesced_": all_reduced,
    "_allgather_base_": gathered,
    "_reduce_scatter_base_": gathered,
    "all_gather_into_tensor": gathered,
    "reduce_scatter_tensor": gathered,
    "all_reduce": all_reduced,
    "all_reduce_": all_reduced,
}


class Counted(TorchDispatchMode):
    """Counts bytes of the collectives that are issued inside, those of autograd's threads and of DDP included."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.processes, self.calls, self.sent = processes, Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition("::")[2].partition(".")[0]
            if name in _RINGS:
                tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                sizes = [tensor.nbytes for tensor in tensors]
                # of gathering and scattering, input and output are given: the larger one is the whole
                size = sum(sizes) if name.startswith(("allreduce", "all_reduce")) else max(sizes)
                if name == "all_gather_into_tensor":
                    size *= self.processes  # its output is not given
                self.calls[name] += 1
                self.sent[name] += round(_RINGS[name](size, self.processes))
            elif name not in ("wait_tensor", "barrier"):
                raise NotImplementedError(f"what a ring sends in {name} is not known here")
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


def measure(rank: int, processes: int, port: int, folder: Path, answers: Any) -> None:
    """One process of a run: trains a few steps and reports."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    loaded = load_config(folder / "recipe.yaml")
    plan = resolve(loaded.run, probe(), read_model_facts(loaded.run.model), world_size=processes)
    session = setup.build(loaded, plan, folder)
    trained = session.trained
    stepper = Stepper(
        session.accelerator,
        session.strategy,
        session.wrapped,
        trained.optimizer,
        trained.schedule,
        trained.scaler,
        session.run.plan,
        1.0,
        lambda *_: None,
    )
    model, steps = session.run.model, session.feed.steps(0, 100)
    for _ in range(2):  # after the first, DDP orders its buckets anew
        stepper.step(next(steps)[1])
    with Counted(processes) as counted:
        stepper.step(next(steps)[1])
    seconds, tokens = [], 0
    for _ in range(STEPS):
        batches = next(steps)[1]
        began = time.process_time()
        tokens = stepper.step(batches).tokens
        seconds.append(time.process_time() - began)
    moments = (value for state in trained.optimizer.state.values() for value in state.values())
    held = sum(_local(tensor) for tensor in (*model.parameters(), *moments) if torch.is_tensor(tensor))
    held += sum(_local(weight) for weight in model.parameters() if weight.requires_grad)  # its gradient
    answers.put(
        {
            "seconds": statistics.median(seconds),
            "tokens": tokens,
            "held": held,
            "sent": sum(counted.sent.values()),
            "calls": sum(counted.calls.values()),
            "expected": expected(model, plan.distribution.value, processes) if processes > 1 else 0.0,
        }
    )


def _local(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor).nbytes


def run(method: str, strategy: str, processes: int) -> list[dict[str, Any]]:
    """What each process of one case reports."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name, socket.socket() as taken:
        text = RECIPE.format(adapter=METHODS[method], strategy=strategy, rows=ROWS // processes, length=LENGTH)
        (Path(name) / "recipe.yaml").write_text(text, encoding="utf-8")
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.close()
        answers = context.SimpleQueue()
        arguments = [(rank, processes, port, Path(name), answers) for rank in range(processes)]
        children = [context.Process(target=measure, args=one) for one in arguments]
        for child in children:
            child.start()
        for child in children:
            child.join()
        if any(child.exitcode for child in children):
            raise SystemExit(f"{method} {strategy} {processes}: a process failed")
        return [answers.get() for _ in children]


def measured(sizes: tuple[int, ...]) -> Iterator[str]:
    """The table of this machine in Markdown, line by line."""
    head = ("method", "strategy", "processes", "tokens per CPU-second", "MiB held", "collectives", "MiB sent")
    yield f"| {' | '.join(head)} | by formula |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for method in METHODS:
        for strategy, processes in [("auto", 1), *((name, size) for size in sizes for name in ("ddp", "fsdp2"))]:
            told = run(method, strategy, processes)
            first, speed = told[0], told[0]["tokens"] / sum(one["seconds"] for one in told)
            sent, formula = (first[key] / 2**20 for key in ("sent", "expected"))
            yield (
                f"| {method} | {'—' if processes == 1 else strategy} | {processes} | {speed:,.0f} "
                f"| {max(one['held'] for one in told) / 2**20:.1f} | {first['calls']} | {sent:.2f} | {formula:.2f} |"
            )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", action="store_true", help="only what is not measured")
    parser.add_argument("--processes", type=json.loads, default=[2, 3, 4], help="how many, as a JSON list")
    options = parser.parse_args()
    if not options.paper:
        print("Measured here:\n")
        for line in measured(tuple(options.processes)):
            print(line, flush=True)
        print()
    print("On paper, 400 Gb/s a GPU between nodes:\n")
    print(*tables(), sep="\n")
    print("\nOn paper, 100 Gb/s a node:\n")
    print(*tables(ETHERNET), sep="\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
