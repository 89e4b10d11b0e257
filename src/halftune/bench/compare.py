"""Measures configurations in turn, each run in a new process and a temporary folder; does not import torch."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halftune.config.load import load_config
from halftune.core.errors import ConfigError, HalftuneError, PlanError
from halftune.core.processes.process import this_process
from halftune.core.processes.signals import unwound_by_signals

# Overrides of measured runs: training steps only, nothing is saved.
ENDLESS = 1_000_000  # steps; the measurement ends the run
OWN = {
    "training.max_steps": str(ENDLESS),
    "training.resume": "never",
    "training.save_steps": "end",
    "training.load_best": "false",
    "training.early_stopping_patience": "null",
    "logging.progress": "false",
    "logging.report_to": "[]",
    "logging.sample_prompts": "[]",
    "logging.profile": "null",
    "logging.probes": "0",
}
FOLDER = "training.output_dir"


class BenchError(HalftuneError):
    """A measured run failed."""

    def __init__(self, what: str, *, where: str, exit_code: int) -> None:
        remedy = "run `halftune train` with the same configuration for details"
        super().__init__(what, code="bench.run_failed", where=where, remedy=remedy)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Case:
    """A configuration to measure.

    Attributes:
        label: its name in the table.
        config: the recipe.
        overrides: ``key=value`` arguments.
    """

    label: str
    config: str
    overrides: tuple[str, ...]


def cases(configs: Sequence[str], overrides: Sequence[str], variants: Sequence[str]) -> list[Case]:
    """Return every recipe, unchanged and with each variant (one or more overrides separated by spaces).

    Raises:
        ConfigError: a recipe or a combination is invalid, or an override is of a key that bench sets; checked before
            anything runs.
        PlanError: started by a launcher with several processes.
    """
    if this_process().world_size != 1:
        what = "bench supports a single process only"
        raise PlanError(what, where="WORLD_SIZE", remedy="start it without torchrun", code="bench.several_processes")
    found = []
    for config in configs:
        for variant in ("", *variants):
            words = (*overrides, *variant.split())
            label = " ".join((*([Path(config).name] if len(configs) > 1 or not variant else []), *variant.split()))
            case = Case(label, config, words)
            load_config(config, words)
            _check_owned(words)
            found.append(case)
    return found


def _check_owned(overrides: Sequence[str]) -> None:
    keys = [word.partition("=")[0].strip() for word in overrides]
    owned = [key for key in keys for own in (*OWN, FOLDER) if f"{key}.".startswith(f"{own}.")]
    if owned:
        raise ConfigError([
            HalftuneError(
                f"bench sets {key} for every run",
                where=key,
                remedy="use --steps" if key == "training.max_steps" else "remove it", code="bench.key_owned",
            )
            for key in dict.fromkeys(owned)
        ])  # fmt: skip


def compare(
    chosen: Sequence[Case], *, steps: int, warm_up: int, repeat: int, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure the cases in turn, ``repeat`` times.

    Returns:
        Per case ``label``, ``config``, ``overrides``, ``runs`` (every run's numbers), ``median`` (of each number over
        the runs) and ``ratio`` (of each median to the first case's).

    Raises:
        BenchError: a run failed.
    """
    runs: list[list[dict[str, Any]]] = [[] for _ in chosen]
    for number in range(repeat):
        for case, found in zip(chosen, runs, strict=True):
            tell(f"run {number * len(chosen) + chosen.index(case) + 1} of {repeat * len(chosen)}: {case.label}")
            found.append(measure(case, steps=steps, warm_up=warm_up))
    medians = [medians_of(found) for found in runs]
    first = medians[0]
    return [
        {
            "label": case.label,
            "config": case.config,
            "overrides": list(case.overrides),
            "median": median,
            "ratio": {key: value / first[key] for key, value in median.items() if first.get(key)},
            "runs": found,
        }
        for case, median, found in zip(chosen, medians, runs, strict=True)
    ]


def medians_of(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of every number over the runs."""
    return {
        key: statistics.median(run[key] for run in runs)
        for key, value in runs[0].items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def measure(case: Case, *, steps: int, warm_up: int) -> dict[str, Any]:
    """Measure one run in a separate process.

    Raises:
        BenchError: it failed.
    """
    with unwound_by_signals(), tempfile.TemporaryDirectory(prefix="halftune-bench-") as name:
        scratch = Path(name)
        own = {**OWN, FOLDER: str(scratch / "run")}
        request, result = scratch / "request.json", scratch / "result.json"
        overrides = [*case.overrides, *(f"{key}={value}" for key, value in own.items())]
        request.write_text(
            json.dumps({"config": case.config, "overrides": overrides, "steps": steps, "warm_up": warm_up})
        )
        command = [sys.executable, "-m", "halftune.bench.measured", str(request), str(result)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
        found = json.loads(result.read_text()) if result.exists() else {}
        if "error" in found:
            raise BenchError(found["error"], where=case.label, exit_code=found["exit_code"])
        if done.returncode:
            raise BenchError(_ending(done.returncode, done.stderr), where=case.label, exit_code=1)
        return found


def _ending(code: int, errors: str) -> str:
    if code == -9:
        return "the measured run was killed (out of memory?)"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no output")
    return f"the measured run exited with {code}: {last}"
