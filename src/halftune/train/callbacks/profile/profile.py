"""``profile.json`` and ``profile_trace.json.gz``: where the time of a few steps goes, by torch's profiler."""

from __future__ import annotations

import json
import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.utils.hooks import RemovableHandle

from halftune.core.atomic import write_text
from halftune.core.log import get_logger
from halftune.core.quantities import duration
from halftune.train.callback import Callback, Phase, StepMetrics
from halftune.train.callbacks.profile.operator_groups import PYTHON, WAIT
from halftune.train.callbacks.profile.tables import tables
from halftune.train.state import TrainState

log = get_logger(__name__)
NAME, TRACE = "profile.json", "profile_trace.json.gz"
WARM_UP = 3  # steps before recording: allocators, caches and the optimizer's states are in place from the second on


class Profile(Callback):
    """Records ``steps`` optimizer steps on the main process, once warmed up, and does nothing before and after.

    Args:
        steps: ``logging.profile``.
    """

    watches = True

    def __init__(self, steps: int) -> None:
        self.wanted, self.seen = steps, 0
        self.profiler: torch.profiler.profile | None = None
        self.recorded: list[float] = []
        self.others: list[float] = []
        self.ranges, self.waiting = ExitStack(), ExitStack()
        self.hook: RemovableHandle | None = None
        self.peak = 0

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """Starts the profiler after the warm-up, and stops it after ``steps`` steps."""
        if not run.is_main:
            return
        self.seen += 1
        if self.profiler is not None:
            self._close()
            self.recorded.append(metrics.seconds)
            self.peak = metrics.memory_bytes
            if len(self.recorded) == self.wanted:
                self._stop(run)
        elif self.recorded or self.seen > 1:  # the first step of a launch is no measure
            self.others.append(metrics.seconds)
        if self.seen == WARM_UP and not self.recorded:
            self._start(run)
        if self.profiler is not None:
            self._open()

    def on_phase(self, run: TrainState, phase: Phase) -> None:
        """Evaluating and saving between two steps belong to neither."""
        if self.profiler is None:
            return
        self._close()
        if phase == "training":
            self._open()

    def on_end(self, run: TrainState, error: BaseException | None) -> None:
        """What was recorded of a run that ended early; a warning where it was nothing."""
        if self.profiler is not None:
            self._close()
            self._stop(run)
        elif run.is_main and not self.recorded and error is None:
            log.warning("no step was profiled: the run has %d, and the first %d warm up", self.seen, WARM_UP)

    def _start(self, run: TrainState) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the recorder tells the terminal of every start and stop
        activities = [ProfilerActivity.CPU]
        if run.device.type in ("cuda", "xpu"):
            activities.append(ProfilerActivity.CUDA if run.device.type == "cuda" else ProfilerActivity.XPU)
        self.profiler = torch.profiler.profile(activities=activities)
        self.hook = run.model.register_forward_pre_hook(lambda *_: self.waiting.close())
        self.profiler.start()

    def _open(self) -> None:
        self.ranges.enter_context(record_function(PYTHON))
        self.waiting.enter_context(record_function(WAIT))  # until the model's forward begins

    def _close(self) -> None:
        self.waiting.close()
        self.ranges.close()

    def _stop(self, run: TrainState) -> None:
        profiler, self.profiler = self.profiler, None
        assert profiler is not None
        assert self.hook is not None
        self.hook.remove()
        profiler.stop()
        if not self.recorded:
            log.warning("no step was profiled: the run ended in the first one after the warm-up")
            return
        found = self._summary(run, profiler)
        try:
            (run.folder / TRACE).unlink(missing_ok=True)  # what is there may be a link
            profiler.export_chrome_trace(str(run.folder / TRACE))
            write_text(run.folder / NAME, json.dumps(found, indent=1))
        except OSError as error:
            log.warning("cannot write the profile: %s", error.strerror)
        log.info("%s", console(found, run.folder))

    def _summary(self, run: TrainState, profiler: torch.profiler.profile) -> dict[str, Any]:
        return {
            "first_step": run.step - len(self.recorded) + 1,
            "last_step": run.step,
            "device": run.device.type,
            "step_seconds": statistics.median(self.recorded),
            "step_seconds_unprofiled": statistics.median(self.others) if self.others else None,
            "memory_bytes": self.peak,
            "trace": TRACE,
            **tables(_raw_events(profiler), len(self.recorded)),
        }


def _raw_events(profiler: torch.profiler.profile) -> list[Any]:
    results = None if profiler.profiler is None else profiler.profiler.kineto_results
    assert results is not None, "a profiler that was stopped has results"
    return results.events()


def console(found: dict[str, Any], folder: Path) -> str:
    """The table of groups and the ten dearest operators as text."""
    device = any(row["device_seconds"] for row in found["groups"])
    kind, word = ("device", found["device"].upper()) if device else ("cpu", "CPU")
    lines = [
        f"profile of steps {found['first_step']}–{found['last_step']}: {duration(found['step_seconds'])} a step, "
        f"{duration(found['data_wait_seconds'])} of it waiting for data",
        f"  {word + ' time by group':<42} {'a step':>10} {'share':>7}",
    ]
    lines += [_line(row["name"], row, kind) for row in found["groups"] if row[f"{kind}_share"] >= 0.001]
    lines.append(f"  {'by operator':<42} {'a step':>10} {'share':>7} {'calls':>8}  group")
    lines += [
        _line(row["name"], row, kind) + f" {row['calls']:8,.0f}  {row['group']}" for row in found["operators"][:10]
    ]
    lines.append(f"  {folder / TRACE} opens in chrome://tracing or ui.perfetto.dev")
    return "\n".join(lines)


def _line(name: str, row: dict[str, Any], kind: str) -> str:
    return f"  {name[:42]:<42} {duration(row[f'{kind}_seconds']):>10} {row[f'{kind}_share']:7.1%}"
