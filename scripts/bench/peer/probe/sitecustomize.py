"""Measures any torch trainer from outside: Python imports this file first where its folder is on ``PYTHONPATH``.

After every optimizer step a JSON line is added to ``$BENCH_STEPS``: the time, this process's CPU-seconds, and the
tokens that entered ``nn.Embedding`` in training so far. The first line also says what is trained, in which dtypes.
Nothing of the measured framework is touched: torch's own hook on optimizer steps, and one wrapped forward.
"""

import importlib.abc
import importlib.util
import json
import os
import resource
import sys
import time

STEPS, PADDING = os.environ.get("BENCH_STEPS"), int(os.environ.get("BENCH_PADDING", "0"))
LAUNCHER = int(os.environ.get("BENCH_LAUNCHER", "0"))  # the process that started the command
SMALLEST_VOCABULARY = 1000  # smaller embeddings are no token embeddings
fed = {"tokens": 0, "real": 0, "steps": 0, "weights": "", "autocast": ""}


def cpu_seconds() -> float:
    """Of this process, all threads, and of its children that have ended."""
    return time.process_time() + sum(os.times()[2:4])


def cpu_of_ancestors() -> float:
    """CPU-seconds of the processes between the launcher and this one, such as ``accelerate launch``."""
    total, process, tick = 0.0, os.getppid(), os.sysconf("SC_CLK_TCK")
    while process not in (0, 1, LAUNCHER):
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) / tick
        process = int(fields[1])
    return total


def after_step(optimizer, _args, _kwargs) -> None:
    """Adds a line; torch calls this after every step of every optimizer."""
    line = {"time": time.time(), "cpu": cpu_seconds(), "tokens": fed["tokens"], "real": fed["real"]}
    line["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if fed["steps"] == 0:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        line |= {
            "cpu_before": cpu_of_ancestors(),
            "trained": sum(p.numel() for p in trained),
            "trained_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in trained}),
            "weights": fed["weights"],
            "autocast": fed["autocast"],
            "optimizer": type(optimizer).__name__,
        }
    fed["steps"] += 1
    with open(STEPS, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def hook_optimizers(module) -> None:
    """``torch.optim.optimizer`` was imported."""
    module.register_optimizer_step_post_hook(after_step)


def hook_embeddings(module) -> None:
    """``torch.nn.modules.sparse`` was imported."""
    import torch

    forward = module.Embedding.forward

    def counted(self, ids):
        if self.training and self.num_embeddings > SMALLEST_VOCABULARY:
            fed["tokens"] += ids.numel()
            fed["real"] += int((ids != PADDING).sum())
            if not fed["weights"]:
                fed["weights"] = str(self.weight.dtype).removeprefix("torch.")
                kind = ids.device.type
                on = torch.is_autocast_enabled(kind)
                fed["autocast"] = str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if on else "off"
        return forward(self, ids)

    module.Embedding.forward = counted


HOOKS = {"torch.optim.optimizer": hook_optimizers, "torch.nn.modules.sparse": hook_embeddings}


class Finder(importlib.abc.MetaPathFinder):
    """Runs a hook right after its module has been imported."""

    def find_spec(self, name, path, target=None):
        hook = HOOKS.pop(name, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(name)  # by the other finders: the hook is no longer in the table
        execute = spec.loader.exec_module

        def exec_and_hook(module):
            execute(module)
            hook(module)

        spec.loader.exec_module = exec_and_hook
        return spec


if STEPS:
    sys.meta_path.insert(0, Finder())
