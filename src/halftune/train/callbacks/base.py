"""What a callback sees, and when it is called. Everything periodic in a run is a callback; the loop only steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from halftune.config.run import RunConfig
from halftune.plan import Plan

if TYPE_CHECKING:  # the files of a run are read, and its report is written, without torch
    import torch

Phase = Literal["tokenising", "compiling", "loading", "training", "evaluating", "saving", "finished"]


@dataclass
class Run:
    """A run in progress, as callbacks see it. Only the trainer changes it.

    Attributes:
        config, plan: what was asked and what was decided.
        folder: the run folder.
        model: the model in training, as built (not wrapped for several processes).
        tokenizer: its tokenizer.
        device: where it trains.
        is_main: whether this process writes files and speaks.
        total_steps: optimizer steps of the whole run.
        steps_per_epoch: optimizer steps of one epoch.
        made_of: identities of base model, tokenizer, chat template and data (``train.made_of``).
        step: optimizer steps done.
        epoch: epochs done, as a fraction.
        best: (step, evaluation loss) of the best evaluation so far.
        stop: a callback sets this to a reason, and the loop ends after the current step.
    """

    config: RunConfig
    plan: Plan
    folder: Path
    model: torch.nn.Module
    tokenizer: Any
    device: torch.device
    is_main: bool
    total_steps: int
    steps_per_epoch: int
    made_of: dict[str, Any] = field(default_factory=dict, kw_only=True)
    step: int = 0
    epoch: float = 0.0
    best: tuple[int, float] | None = None
    stop: str = ""

    @property
    def sharded(self) -> bool:
        """Whether each process holds a share of the weights: a forward pass then needs all of them."""
        return self.plan.distribution.value == "fsdp2"


@dataclass
class StepMetrics:
    """What one optimizer step measured, over all processes.

    Attributes:
        loss: mean cross-entropy in nats over the trained tokens of the global batch.
        learning_rate: of the first parameter group, as used in this step.
        grad_norm: global gradient norm before clipping.
        tokens: fed tokens, padding included.
        tokens_real: without padding.
        tokens_trained: that carry a label.
        seconds: wall time of the step, the making of its batches included.
        memory_bytes: peak device memory so far; resident memory of the process on a CPU.
        extra: further numbers to log, e.g. the loss scale.
    """

    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_real: int
    tokens_trained: int
    seconds: float
    memory_bytes: int
    extra: dict[str, float] = field(default_factory=dict)


class Callback:
    """Does nothing at every point; a callback overrides what it needs. Called on every process.

    Attributes:
        watches: it only looks on (writes, draws, reports): where it fails, training goes on without it.
        together: it computes with the model. Where that is sharded, a process on which it fails has left the others in
            the middle of a forward pass, and training cannot go on.
    """

    watches: ClassVar[bool] = False
    together: ClassVar[bool] = False

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of it, JSON-able; asked of the main process."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes back what :meth:`state` gave, before ``on_start``; not called where the checkpoint knows none."""

    def on_start(self, run: Run) -> None:
        """Once, before the first step: the model is loaded, the plan is checked, a checkpoint has been restored."""

    def on_phase(self, run: Run, phase: Phase) -> None:
        """The run enters another phase."""

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        """After every optimizer step."""

    def on_evaluate(self, run: Run, metrics: dict[str, float]) -> None:
        """After an evaluation; ``metrics`` has at least ``eval_loss``."""

    def on_save(self, run: Run, folder: Path) -> None:
        """After a checkpoint is complete on disk; on the main process only."""

    def on_end(self, run: Run, error: BaseException | None) -> None:
        """Once, at the end; ``error`` is what ended the run early, or None. Must not raise."""
