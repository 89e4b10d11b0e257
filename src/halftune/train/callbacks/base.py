"""What a callback sees, and when it is called. Everything periodic in a run is a callback; the loop only steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from halftune.train.state import TrainState

Averages = dict[str, tuple[float, float]]  # name → (sum, count)
Phase = Literal["tokenising", "compiling", "loading", "training", "evaluating", "saving", "finished"]


@dataclass
class StepMetrics:
    """What one optimizer step measured, over all processes.

    Attributes:
        loss: of the global batch: the method's sum over its examples, divided by ``weight``.
        learning_rate: of the first parameter group, as used in this step.
        grad_norm: global gradient norm before clipping.
        tokens: fed tokens, padding included.
        tokens_real: without padding.
        tokens_trained: that carry a label.
        seconds: wall time of the step, the making of its batches included.
        memory_bytes: peak device memory so far; resident memory of the process on a CPU.
        extra: further numbers to log, e.g. the loss scale.
        weight: what the loss was divided by: trained tokens, or what the method counts.
        averages: the method's own metrics, each a sum and what it is divided by.
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
    weight: float = field(default=0.0, kw_only=True)
    averages: Averages = field(default_factory=dict, kw_only=True)


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

    def on_start(self, run: TrainState) -> None:
        """Once, before the first step: the model is loaded, the plan is checked, a checkpoint has been restored."""

    def on_phase(self, run: TrainState, phase: Phase) -> None:
        """The run enters another phase."""

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """After every optimizer step."""

    def on_evaluate(self, run: TrainState, metrics: dict[str, float]) -> None:
        """After an evaluation; ``metrics`` has at least ``eval_loss``."""

    def on_save(self, run: TrainState, folder: Path) -> None:
        """After a checkpoint is complete on disk; on the main process only."""

    def on_end(self, run: TrainState, error: BaseException | None) -> None:
        """Once, at the end; ``error`` is what ended the run early, or None. Must not raise."""
