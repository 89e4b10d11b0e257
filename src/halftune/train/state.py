"""The live state of a run, in one object."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halftune.config.run import RunConfig
from halftune.plan import Plan

if TYPE_CHECKING:  # the files of a run are read, and its report is written, without torch
    import torch
    from accelerate import Accelerator
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from halftune.data.pipeline import PreparedData
    from halftune.methods import Method, Reference
    from halftune.train.batches.feed import Feed
    from halftune.train.checkpoint.run_inputs import InputChanges
    from halftune.train.parallel.strategy import Strategy
    from halftune.train.rollouts import Rollouts


@dataclass(kw_only=True)
class TrainState:
    """A run in progress: the set-up makes it, the loop changes it, checkpoints save it, callbacks read it.

    Attributes:
        config: what was asked.
        plan: what was decided; final.
        folder: the run folder.
        resume_from: the checkpoint that the run resumes from, or None.
        changes: what differs from that checkpoint.
        inputs: identities of base model, tokenizer, chat template and data (``train.checkpoint.run_inputs``).
        accelerator: the processes; its own mixed precision is off.
        strategy: how processes share the model.
        device: where this process trains.
        is_main: whether this process writes files and logs.
        model: the model in training, as built (not wrapped for several processes).
        wrapped: what forward passes of training are made with.
        tokenizer: its tokenizer.
        method: computes the loss.
        optimizer, schedule, scaler: update the weights; a checkpoint holds their states.
        data: the tokenised splits and their report.
        feed: batches of training, in micro-batches that fit the memory.
        eval_feed: batches of the evaluation split, or None.
        reference, eval_reference: the model before training, as log-probabilities that were computed then for training
            and evaluation data; None where the adapter is switched off instead, or none is needed.
        rollouts: answers prompts, for methods that learn from the model's own answers.
        position: what a step number means in this data (``train.checkpoint.resume.position``).
        micro_batch: planned rows of a forward pass; ``feed`` may have come to fewer.
        total_steps: optimizer steps of the whole run.
        steps_per_epoch: optimizer steps of the first epoch.
        step: optimizer steps done.
        epoch: epochs done, as a fraction.
        best: (step, ``training.metric_for_best``) of the best evaluation so far.
        evaluated, saved: the step of the last evaluation and of the last checkpoint; -1 without one.
        taken: optimizer steps that this process has done itself, since its start.
        began: the checkpoint that ``training.resume`` named when the run began, or None.
        stop: a callback sets this to a reason, and the loop ends after the current step.
        late: a step's numbers are read while the next one runs, and the device keeps updates out that are not finite.
        broken: while late, on the device: whether a step was not finite, so that no later one updates the weights
            before that is read.
    """

    config: RunConfig
    plan: Plan
    folder: Path
    resume_from: Path | None
    changes: InputChanges
    inputs: dict[str, Any]
    accelerator: Accelerator
    strategy: Strategy
    device: torch.device
    is_main: bool
    model: torch.nn.Module
    wrapped: torch.nn.Module
    tokenizer: Any
    method: Method
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler
    data: PreparedData
    feed: Feed
    eval_feed: Feed | None
    position: dict[str, Any] = field(repr=False)
    micro_batch: int
    total_steps: int
    steps_per_epoch: int
    reference: Reference | None = None
    eval_reference: Reference | None = None
    rollouts: Rollouts | None = None
    step: int = 0
    epoch: float = 0.0
    best: tuple[int, float] | None = None
    evaluated: int = -1
    saved: int = -1
    taken: int = 0
    began: str | None = None
    stop: str = ""
    late: bool = False
    broken: Any = field(default=False, repr=False)

    @property
    def processes(self) -> int:
        """How many processes train."""
        return self.accelerator.num_processes

    @property
    def sharded(self) -> bool:
        """Whether each process holds a share of the weights: a forward pass then needs all of them."""
        return self.plan.distribution.value == "fsdp2"

    @property
    def rate(self) -> float:
        """Learning rate of the first parameter group in the next step."""
        return float(self.schedule.get_last_lr()[0])

    @cached_property
    def trainable(self) -> list[torch.nn.Parameter]:
        """The weights that are trained."""
        return [parameter for parameter in self.wrapped.parameters() if parameter.requires_grad]
