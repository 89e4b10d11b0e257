"""Runs a command and measures it from outside, with the help of ``probe/sitecustomize.py``."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

PROBE = Path(__file__).resolve().parent / "probe"
POLL_SECONDS = 0.25
PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch(threading.Thread):
    """Peak resident memory of a process and all its descendants together, in bytes, looked at four times a second."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.done = process, 0, threading.Event()

    def run(self) -> None:
        """Looks until told to stop."""
        while not self.done.wait(POLL_SECONDS):
            self.peak = max(self.peak, sum(map(_resident, _family(self.process))))


def _resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def _family(process: int) -> list[int]:
    found = [process]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def run_measured(command: list[str], out: Path, *, threads: int, timeout: float) -> dict[str, Any]:
    """Runs a command; its output goes to ``out/transcript.log``.

    Returns:
        ``rc``, ``wall_seconds``, ``cpu_seconds`` (the whole command), ``peak_rss_bytes`` (all processes together) and
        ``steps``, the probe's lines.
    """
    lines = out / "steps.jsonl"
    environment = {
        **os.environ,
        "BENCH_STEPS": str(lines),
        "BENCH_LAUNCHER": str(os.getpid()),
        "PYTHONPATH": str(PROBE),
        "PATH": f"{Path(command[0]).parent}:{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(out / "cache"),  # nobody finds tokenised data of an earlier run
        "HALFTUNE_CACHE": str(out / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "DO_NOT_TRACK": "1",
        "WANDB_MODE": "disabled",
    }
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    with (out / "transcript.log").open("wb") as log:
        # a session of its own: a fair share of the machine for each, and one group to end at a time-out
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, cwd=out, start_new_session=True
        )
        watch = MemoryWatch(process.pid)
        watch.start()
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = 124
        finally:
            watch.done.set()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    steps = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return {
        "rc": code,
        "began": began,
        "wall_seconds": time.time() - began,
        "cpu_seconds": cpu,
        "peak_rss_bytes": max(watch.peak, max((step["rss"] for step in steps), default=0)),
        "steps": steps,
    }


def summary(found: dict[str, Any], warm_up: int) -> dict[str, Any]:
    """Numbers of a measured run; speeds are of the steps after the first ``warm_up``."""
    steps = found["steps"]
    numbers = {key: found[key] for key in ("rc", "wall_seconds", "cpu_seconds", "peak_rss_bytes")}
    numbers["num_steps"] = len(steps)
    if not steps:
        return numbers
    first = steps[0]
    numbers |= {key: first[key] for key in ("trained", "trained_dtypes", "weights", "autocast", "optimizer")}
    numbers["cpu_to_first_step"] = first["cpu"] + first["cpu_before"]
    numbers["wall_to_first_step"] = first["time"] - found["began"]
    measured = steps[warm_up - 1 :]
    if len(measured) < 3:
        return numbers
    start, end = measured[0], measured[-1]
    wall = [b["time"] - a["time"] for a, b in pairwise(measured)]
    cpu = [b["cpu"] - a["cpu"] for a, b in pairwise(measured)]
    real = end["real"] - start["real"]
    return numbers | {
        "measured_steps": len(measured) - 1,
        "tokens_per_step": (end["tokens"] - start["tokens"]) / (len(measured) - 1),
        "real_per_step": real / (len(measured) - 1),
        "tokens_per_cpu_second": real / (end["cpu"] - start["cpu"]),
        "tokens_per_second": real / (end["time"] - start["time"]),
        "step_seconds": statistics.median(wall),
        "step_cpu_seconds": statistics.median(cpu),
    }
