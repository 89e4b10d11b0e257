"""A callback that times every step and ends the run after the last measured one."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from peft import PeftModel
from torch import Tensor, nn

from halftune.bench.tower_flops import INPUTS
from halftune.train.callback import Callback, Phase, StepMetrics
from halftune.train.state import TrainState


class Measured(BaseException):
    """Ends a measured run before evaluation and saving."""


@dataclass(frozen=True)
class Step:
    """An optimizer step including its batches: wall and CPU seconds; all, real (unpadded) and trained tokens."""

    seconds: float
    cpu_seconds: float
    tokens: int
    real: int
    trained: int


def cpu_seconds() -> float:
    """Return the user and system time of this process and its finished children."""
    return time.process_time() + sum(os.times()[2:4])


class Meter(Callback):
    """Measures ``warm_up + steps`` steps, then raises ``Measured``.

    Attributes:
        steps: all steps, warm-up included.
        cpu_to_first_step, seconds_to_first_step: from the start of this process to the end of the first step.
        fed: what the towers got in each forward pass of the measured steps; tensors of pixels are on the meta device.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.wanted = warm_up, warm_up + steps
        self.steps: list[Step] = []
        self.cpu_to_first_step = self.seconds_to_first_step = 0.0
        self.fed: list[dict[str, Tensor]] = []
        self._since = (0.0, 0.0)

    def watch(self, model: nn.Module) -> None:
        """Note what the towers of a model in training get."""
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        base.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        given = {name: kwargs[name] for name in INPUTS if kwargs.get(name) is not None}
        if given and len(self.steps) >= self.warm_up:
            self.fed.append({name: one.to("meta") if one.is_floating_point() else one for name, one in given.items()})

    def on_phase(self, run: TrainState, phase: Phase) -> None:
        """Start timing when training begins or continues."""
        if phase == "training":
            self._since = (time.perf_counter(), cpu_seconds())

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """Record a step; synchronises with the device only at the beginning and end of the measurement."""
        number = len(self.steps) + 1
        if number in (1, self.warm_up, self.wanted) and run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        wall, cpu = time.perf_counter(), cpu_seconds()
        before, cpu_before = self._since
        counts = (metrics.tokens, metrics.tokens_real, metrics.tokens_trained)
        self.steps.append(Step(wall - before, cpu - cpu_before, *counts))
        if number == 1:
            self.cpu_to_first_step = cpu
            self.seconds_to_first_step = time.time() - psutil.Process().create_time()
        if number == self.wanted:
            raise Measured
        self._since = (time.perf_counter(), cpu_seconds())
