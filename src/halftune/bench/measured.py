"""The measured process: ``python -m halftune.bench.measured REQUEST RESULT`` trains and writes its numbers."""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halftune.bench.flops import training_flops
from halftune.config.facts.media import TOWERS
from halftune.config.facts.model import ModelFacts
from halftune.config.load import load_config
from halftune.config.recipe_facts import run_facts
from halftune.core import log
from halftune.core.errors import HalftuneError
from halftune.core.optional import quick_imports
from halftune.hardware.probe import probe
from halftune.plan import resolve
from halftune.plan.weights.parts import modes
from halftune.plan.weights.trainable import count_trainable

with quick_imports():  # as `train` does
    import torch

    from halftune.bench.meter import Measured, Meter, Step
    from halftune.bench.peak import peak_flops
    from halftune.bench.tower_flops import tower_flops
    from halftune.train.parallel.processes import peak_memory_bytes
    from halftune.train.run_folder.start_or_resume import open_folder
    from halftune.train.setup import build
    from halftune.train.signals.interrupt import Interrupts
    from halftune.train.state import TrainState
    from halftune.train.trainer import Trainer


def main(request: Path, result: Path) -> int:
    """Train as requested; write a JSON object of numbers, or of an ``error`` and its ``exit_code``."""
    log.configure()
    asked = json.loads(request.read_text())
    try:
        found, code = measure(asked), 0
    except HalftuneError as error:
        found, code = {"error": str(error), "code": error.code, "exit_code": error.exit_code}, error.exit_code
    result.write_text(json.dumps(found))
    return code


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure one run.

    Raises:
        HalftuneError: the configuration cannot be trained.
    """
    loaded = load_config(asked["config"], asked["overrides"])
    facts = run_facts(loaded.run)
    hardware = probe()
    plan = resolve(loaded.run, hardware, facts)
    folder = open_folder(loaded)
    run = build(loaded, plan, folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    run.eval_feed = None  # measure training only
    plan = run.plan
    meter = Meter(asked["warm_up"], asked["steps"])
    with Interrupts() as interrupts, suppress(Measured):
        trainer = Trainer(run, interrupts)
        trainer.callbacks.callbacks.append(meter)
        meter.watch(run.model)
        trainer.train()
    device = run.device
    memory = {"peak_rss_bytes": peak_memory_bytes(torch.device("cpu"))}
    if device.type != "cpu":
        memory["peak_device_bytes"] = peak_memory_bytes(device)
    flops = training_flops(
        facts, language_trained(run, facts), adapter=modes(run.config)["language"] != "full", attended=attended(run)
    )
    towers = sum(tower_flops(facts, run.config, fed) for fed in meter.fed)
    compute = plan.precision.compute.value
    peak = peak_flops(device, hardware.devices[0].name, compute, tf32=plan.precision.tf32.value)
    steps = meter.steps[asked["warm_up"] :]
    numbers = rates(steps)
    real, trained, seconds = (sum(getattr(step, name) for step in steps) for name in ("real", "trained", "seconds"))
    achieved = flops.per_second(real, trained, seconds) + towers / seconds
    return {
        **numbers,
        "mfu": achieved / peak.flops,
        "flops_per_second": achieved,
        "mfu_convention": flops.convention + (f"; towers {towers / len(steps):,.0f} a step" if towers else ""),
        "tower_flops_per_step": towers / len(steps),
        "peak_flops": peak.flops,
        "peak_flops_source": peak.source,
        **memory,
        "cpu_seconds_to_first_step": meter.cpu_to_first_step,
        "seconds_to_first_step": meter.seconds_to_first_step,
        "compute": compute,
        "packing": plan.batch.packing.value,
        "attention": plan.attention.softmax.value,
        "threads": torch.get_num_threads(),
        "device": hardware.devices[0].name,
        "torch": torch.__version__,
        "steps": [asdict(step) for step in meter.steps],
    }


def language_trained(run: TrainState, facts: ModelFacts) -> int:
    """Return the number of trained weights of the language model."""
    chosen = modes(run.config)
    if {chosen[part] for part in TOWERS} == {"frozen"}:
        return run.plan.num_trainable.value
    return 0 if chosen["language"] == "frozen" else count_trainable(facts, run.config.adapter).count.value


def attended(run: TrainState) -> float:
    """Return the mean over tokens of their sample's length."""
    lengths = run.data.train.lengths.astype(float)
    return float((lengths**2).sum() / lengths.sum())


def rates(steps: list[Step]) -> dict[str, float]:
    """Return throughput over all steps, and step times (median, inclusive 10 % and 90 % quantiles)."""
    seconds, cpu = sum(step.seconds for step in steps), sum(step.cpu_seconds for step in steps)
    found: dict[str, float] = {}
    for name in ("tokens", "real", "trained"):
        total = sum(getattr(step, name) for step in steps)
        found[f"{name}_per_second"], found[f"{name}_per_cpu_second"] = total / seconds, total / cpu
    times = sorted(step.seconds for step in steps)
    tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else [times[0]] * 9
    return found | {
        "step_seconds": statistics.median(times),
        "step_seconds_p10": tenths[0],
        "step_seconds_p90": tenths[-1],
        "step_cpu_seconds": statistics.median(step.cpu_seconds for step in steps),
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
