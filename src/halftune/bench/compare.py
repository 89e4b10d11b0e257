"""Measures one or more configurations in turn, each run in a fresh process and a scratch folder; needs no torch."""

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
from halftune.core.launcher import this_process

# What a measured run does otherwise than the recipe says: nothing but steps, and nothing of it stays.
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
}
FOLDER = "training.output_dir"


class BenchError(HalftuneError):
    """A measured run ended before it was measured."""

    def __init__(self, what: str, *, where: str, exit_code: int) -> None:
        super().__init__(what, where=where, remedy="`halftune train` with the same configuration shows more")
        self.exit_code = exit_code


@dataclass(frozen=True)
class Case:
    """A configuration to measure.

    Attributes:
        label: how it is called in the table.
        config: the recipe.
        overrides: ``key=value`` arguments.
    """

    label: str
    config: str
    overrides: tuple[str, ...]


def cases(configs: Sequence[str], overrides: Sequence[str], variants: Sequence[str]) -> list[Case]:
    """Every recipe as it is, and with each of the variants (one or more overrides with spaces between).

    Raises:
        ConfigError: a recipe or a combination is wrong, or an override is of a key that bench sets itself; checked
            before anything runs.
        PlanError: several processes would be measured.
    """
    if this_process().world_size != 1:
        raise PlanError("bench measures one process", where="WORLD_SIZE", remedy="start it without torchrun")
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
                f"bench sets {key} itself, for every run that it measures",
                where=key,
                remedy="say --steps" if key == "training.max_steps" else "leave it out",
            )
            for key in dict.fromkeys(owned)
        ])  # fmt: skip


def compare(
    chosen: Sequence[Case], *, steps: int, warm_up: int, repeat: int, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measures the cases in turn, ``repeat`` times over.

    Returns:
        Per case ``label``, ``config``, ``overrides``, ``runs`` (every run's numbers), ``median`` (of each number over
        the runs) and ``ratio`` (of each median to the first case's).

    Raises:
        BenchError: a run failed; says why.
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
    """The median of every number that the runs have."""
    return {
        key: statistics.median(run[key] for run in runs)
        for key, value in runs[0].items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def measure(case: Case, *, steps: int, warm_up: int) -> dict[str, Any]:
    """One run in a process of its own.

    Raises:
        BenchError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="halftune-bench-") as name:
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
        return "the measured run was killed, most likely for want of memory"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "without a word")
    return f"the measured run ended with code {code}: {last}"
