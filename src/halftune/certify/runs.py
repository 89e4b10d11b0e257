"""Training runs of a small copy: every adapter, every method, a run that was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file

from halftune.certify.certificate import Line, listed
from halftune.certify.workbench import TOKENIZER, Workbench, reported
from halftune.config.facts.model import ModelFacts
from halftune.config.load import LoadedConfig
from halftune.config.sections.method import METHOD_SECTIONS
from halftune.core.run_metrics import read_metrics
from halftune.hardware import Hardware
from halftune.model.adapters import load_adapter, without_unused_formats
from halftune.model.files.architectures import own_architectures
from halftune.model.load.load import load_model
from halftune.model.result.merge import fp32_plan, merge_adapter
from halftune.plan import resolve
from halftune.plan.weights.adapter_types import ADAPTER_TYPES
from halftune.train.run_folder.checkpoints import PREFIX
from halftune.train.trainer import train

_SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4}, "oft": {"block_size": 4}, "vera": {"rank": 8}, "ia3": {}, "loha": {"rank": 2},
    "lokr": {"rank": 2, "factor": 4},
}  # fmt: skip
_METHODS: dict[str, dict[str, Any]] = {
    "kto": {"group_size": 2},
    "grpo": {"num_generations": 2, "max_completion_length": 4},
}
_REWARD = "def alternate(completions, **_):\n    return [n % 2 for n, _ in enumerate(completions)]\n"
_PEFT = 1e-4  # relative difference of logits, ours and peft's, in fp32
_STEPS, _SAVED, _KILL_LIMIT = 40, 2, 300.0  # steps of the run that is killed, between checkpoints; seconds


def adapters(bench: Workbench) -> Iterator[Line]:
    """Train, save, load by peft and merge every type of adapter."""
    for name in ("lora", *ADAPTER_TYPES):
        lines: list[Line] = []
        with reported(f"adapter {name}", lines):
            lines.append(_adapter(bench, name))
        yield from lines


def _adapter(bench: Workbench, name: str) -> Line:
    loaded = bench.recipe(f"adapter-{name}", adapter={"type": name, **_SETTINGS[name]})
    plan = bench.plan(loaded)
    final = train(loaded, plan).folder / "final"
    exact = fp32_plan(plan, "fp32")
    with torch.no_grad(), without_unused_formats(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base: Any = load_model(loaded.run.model, exact, for_training=False)
        with own_architectures():
            plain = type(base).from_pretrained(bench.section.name_or_path, dtype=torch.float32)
        ids_BT = torch.arange(100, 124).reshape(2, 12)
        before = plain.eval()(input_ids=ids_BT, use_cache=False).logits
        theirs = PeftModel.from_pretrained(plain, final).eval()(input_ids=ids_BT, use_cache=False).logits
        ours = load_adapter(base, final, exact)(input_ids=ids_BT, use_cache=False).logits
    apart = float((ours - theirs).norm() / theirs.norm())
    moved = float((theirs - before).norm() / before.norm())
    merged = merge_adapter(loaded.run.model, final, exact, "fp32")
    what = (
        f"{plan.num_trainable.value:,} weights trained and saved; peft loads it (logits differ by {apart:.0e}, moved "
        f"by {moved:.0e}); merged with a logit error of {merged.forward_error:.0e}"
    )
    if not apart <= _PEFT:
        return Line(f"adapter {name}", "no", f"peft loads another adapter than was trained: {what}")
    if not moved > apart:
        return Line(f"adapter {name}", "no", f"the trained adapter changes nothing: {what}")
    return Line(f"adapter {name}", "yes", what)


def methods(bench: Workbench, hardware: Hardware, facts: ModelFacts, *, generates: bool) -> Iterator[Line]:
    """Plan every method for the model on a machine, and train two steps of it on the copy.

    Args:
        bench: the small copy.
        hardware, facts: what is planned for.
        generates: whether it generates what it computes without a cache.
    """
    for name, section in METHOD_SECTIONS.items():
        if section.generates and not generates:
            what = "its rollouts would be wrong: see generation"
            yield Line(f"method {name}", "no", what, "use a method without rollouts")
            continue
        lines: list[Line] = []
        with reported(f"method {name}", lines):
            settings: dict[str, Any] = {"type": name, **_METHODS.get(name, {})}
            if section.generates:
                (bench.folder / "rewards.py").write_text(_REWARD)
                settings["rewards"] = [{"function": "alternate", "file": str(bench.folder / "rewards.py")}]
            if name == "distill":
                settings["teacher"] = TOKENIZER  # of the same vocabulary
            loaded = bench.recipe(f"method-{name}", section.records[0], method=settings, data={"packing": False})
            what = f"two steps on the small copy: {train_losses(bench, loaded)}"
            if name != "distill":  # of a teacher of its own
                resolve(bench.asked(f"asked-{name}", method=settings).run, hardware, facts)
                what += f"; the plan accepts it on {hardware.devices[0].name}"
            lines.append(Line(f"method {name}", "yes", what))
        yield from lines


def train_losses(bench: Workbench, loaded: LoadedConfig) -> str:
    """Train a recipe, and return its losses and gradient norms."""
    folder = train(loaded, bench.plan(loaded)).folder
    steps = [line for line in read_metrics(folder) if "loss" in line]
    losses, norms = (", ".join(f"{step[name]:.3g}" for step in steps) for name in ("loss", "grad_norm"))
    return f"loss {losses}, gradient norm {norms}"


def resumed(bench: Workbench, *, kill: bool) -> Iterator[Line]:
    """Resume a run and compare every weight with one that was never interrupted.

    Args:
        bench: the small copy.
        kill: whether the run is a process of its own that is killed (SIGKILL); else it goes on from a checkpoint in
            another folder.
    """
    lines: list[Line] = []
    with reported("resume", lines):
        steps = _STEPS if kill else 2 * _SAVED
        keys = {"max_steps": steps, "save_steps": _SAVED, "save_total_limit": None}
        stopped = bench.recipe("stopped", training=keys)
        killed_after = _killed(stopped) if kill else 0
        whole = bench.recipe("whole", training=keys)
        first = train(whole, bench.plan(whole)).folder
        if not kill:
            keys["resume"] = str(first / f"{PREFIX}{_SAVED}")
            stopped = bench.recipe("stopped", training=keys)
        second = train(stopped, bench.plan(stopped)).folder
        one, other = (load_file(folder / "final" / "adapter_model.safetensors") for folder in (first, second))
        different = [name for name in one if name not in other or not torch.equal(one[name], other[name])]
        how = f"killed (SIGKILL) after {PREFIX}{killed_after}" if kill else f"resumed from {PREFIX}{_SAVED}"
        what = f"{how}: all {len(one)} trained tensors are equal to the bit after step {steps}"
        if different:
            what = f"{how}: {len(different)} of {len(one)} tensors differ after step {steps}: {listed(different)}"
        lines.append(Line("resume", "no" if different else "yes", what))
        for folder in (first, second):
            shutil.rmtree(folder)
    yield from lines


def _killed(loaded: LoadedConfig) -> int:
    """Start a run in a process of its own and kill it once it has a checkpoint; returns the checkpoint's step."""
    folder = Path(loaded.run.training.output_dir)
    command = [sys.executable, "-m", "halftune", "train", "--config", str(loaded.path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + _KILL_LIMIT
    try:
        while process.poll() is None and time.monotonic() < end and not list(folder.glob(f"{PREFIX}[0-9]*")):
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate()
    found = sorted(int(one.name.removeprefix(PREFIX)) for one in folder.glob(f"{PREFIX}[0-9]*"))
    if not found:
        raise RuntimeError(f"the run in a process of its own made no checkpoint: {said.strip().splitlines()[-1:]}")
    if (folder / "final").exists():
        raise RuntimeError("the run ended before it could be killed")
    os.sync()
    return found[-1]
