"""One optimizer step: the loss of the whole global batch, its gradient, clipping, the update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halftune.plan import Plan
from halftune.precision.dtypes import autocast
from halftune.train.callbacks.base import StepMetrics
from halftune.train.feed import MicroBatch
from halftune.train.losses import forward_loss_sum
from halftune.train.memory import peak_memory_bytes
from halftune.train.parallel.pulse import tick
from halftune.train.parallel.strategy import Strategy
from halftune.train.processes import sum_over_processes


@dataclass
class Stepper:
    """Everything that a step touches.

    Attributes:
        accelerator: processes and devices; its own mixed precision is off, the plan's autocast is used.
        strategy: how processes share the model.
        model: as the strategy wrapped it.
        check_finite: called with loss, gradient norm and the micro-batches before the weights change; raises to leave
            them alone.
    """

    accelerator: Accelerator
    strategy: Strategy
    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler
    plan: Plan
    max_grad_norm: float
    check_finite: Callable[[float, float, list[MicroBatch]], None]

    def __post_init__(self) -> None:
        self.trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def step(self, batches: list[MicroBatch]) -> StepMetrics:
        """Trains on one global batch.

        The loss is the sum over its labelled tokens divided by their number, over all micro-batches and processes: how
        the batch is split changes nothing but rounding.
        """
        counts = [[batch.tokens, batch.tokens_real, batch.tokens_trained] for batch in batches]
        sums = sum_over_processes(self.accelerator, [sum(column) for column in zip(*counts, strict=True)])
        tokens, real, trained = (int(value) for value in sums)
        loss = self._accumulate(batches, trained)
        self.scaler.unscale_(self.optimizer)
        norm = self.strategy.gradient_norm(self.trainable, self.max_grad_norm)
        rate = float(self.schedule.get_last_lr()[0])
        metrics = StepMetrics(loss, rate, norm, tokens, real, trained, 0.0, 0)
        self._update(metrics, batches)
        metrics.memory_bytes = peak_memory_bytes(self.accelerator.device)
        return metrics

    def _accumulate(self, batches: list[MicroBatch], trained: int) -> float:
        # Gradients are averaged over processes; the loss wants their sum.
        scale = self.accelerator.num_processes / max(trained, 1)
        losses = []
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with self.strategy.accumulating(self.model, last=last):
                loss_sum = self.forward(batch, self.model, scale)
                self.scaler.scale(loss_sum * scale).backward()
            losses.append(loss_sum.detach())
        local = float(torch.stack(losses).cpu().double().sum())
        return sum_over_processes(self.accelerator, [local])[0] / max(trained, 1)

    def forward(self, batch: MicroBatch, model: nn.Module, scale: float = 1.0) -> torch.Tensor:
        """Sum of the cross-entropy over the labelled tokens of a micro-batch, fp32, under the plan's autocast.

        ``scale`` is what the result will be multiplied with before the backward pass.
        """
        tick()
        device = self.accelerator.device
        inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.inputs.items()}
        with autocast(self.plan.precision, device):
            loss = forward_loss_sum(model, inputs, scale=scale)[0]
        tick()  # one that waits in the backward pass is further than one that hangs before
        return loss

    def _update(self, metrics: StepMetrics, batches: list[MicroBatch]) -> None:
        # An overflow of scaled gradients is the scaler's daily business: it skips the update and lowers the scale.
        scaled = self.scaler.is_enabled()
        self.check_finite(metrics.loss, 0.0 if scaled else metrics.grad_norm, batches)
        updated = True
        if scaled:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            scale = self.scaler.get_scale()
            updated = scale >= before
            metrics.extra |= {"loss_scale": scale, "skipped": float(not updated)}
        else:
            self.optimizer.step()
        if updated:
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
