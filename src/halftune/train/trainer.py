"""The training loop, from a loaded config to a final adapter or model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halftune.config.load import LoadedConfig
from halftune.core.log import FILE_ONLY, get_logger, log_to
from halftune.core.processes import heartbeat
from halftune.core.processes.process import this_process
from halftune.model.files.result import FINAL, finished_at
from halftune.model.files.target import RESOLVED
from halftune.optim import show_average
from halftune.plan import Plan
from halftune.train.callback import Callback, CallbackList, Phase, StepMetrics
from halftune.train.callbacks import build as build_callbacks
from halftune.train.callbacks.status import before_training
from halftune.train.checkpoint.run_inputs import BaseFiles, warn_other_inputs
from halftune.train.finish import interruption, load_best, reported_end, write_result
from halftune.train.loop.evaluate import evaluate
from halftune.train.loop.nonfinite import check_weights
from halftune.train.loop.stepper import Stepper
from halftune.train.parallel.processes import barrier, sum_over_processes
from halftune.train.run_folder.lock import locked
from halftune.train.run_folder.start_or_resume import completed_message, open_folder, write_intent
from halftune.train.save_restore import restore, save
from halftune.train.schedule import ends_part, steps_between
from halftune.train.setup import build
from halftune.train.signals.interrupt import Interrupts
from halftune.train.state import TrainState

if TYPE_CHECKING:
    from halftune.train.signals.stop_listener import StopListener

log = get_logger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its folder, the optimizer steps done and one sentence for the user."""

    folder: Path
    step: int
    message: str


def train(loaded: LoadedConfig, plan: Plan, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Train a run to its end; resume if its folder holds checkpoints.

    Args:
        loaded, plan: what was asked and what was decided.
        callbacks: called after the built-in ones.

    Raises:
        HalftuneError: anything the user can act on; earlier checkpoints are intact.
    """
    main, path = this_process().main, Path(loaded.run.training.output_dir)
    several = plan.batch.world_size > 1
    with Interrupts(_stop_listener(loaded) if several else None) as interrupts, locked(path) if main else nullcontext():
        folder = open_folder(loaded, main=main, several=several)
        if folder.finished:
            return Outcome(path, finished_at(path) or 0, completed_message(path))
        with before_training(path) as phase:
            run = build(loaded, plan, folder, phase)
            source = loaded.path.parent
            if main and loaded.path.name == RESOLVED and source.resolve() != path.resolve():
                warn_other_inputs(run.inputs, source)
            if main:
                write_intent(folder, loaded, run.plan, run.data.report)
            if run.sharded:
                from halftune.train.parallel.saving import check_shared

                check_shared(run.strategy, path)
        return Trainer(run, interrupts, callbacks).train()


def _stop_listener(loaded: LoadedConfig) -> StopListener:
    from halftune.train.signals.stop_listener import StopListener  # for several processes

    return StopListener(Path(loaded.run.training.output_dir), loaded.run.distributed.stop_seconds)


class Trainer:
    """The training loop: steps, evaluations and checkpoints. Everything else is a callback.

    Args:
        run: holds all state that changes in training.
        interrupts: holds the signal that was received, if any.
        callbacks: called after the built-in ones.
    """

    def __init__(self, run: TrainState, interrupts: Interrupts, callbacks: Sequence[Callback] = ()) -> None:
        self.run, self.interrupts = run, interrupts
        self.callbacks = CallbackList([*build_callbacks(run.config, run.plan), *callbacks])
        self.steps = Stepper(run, self._stepped, lambda: self.interrupts.received is not None)
        self.base = BaseFiles(run.config.model, run.inputs["model"])
        self.began = 0.0

    def train(self) -> Outcome:
        """Run the loop. Callbacks get ``on_end`` also after an error."""
        run = self.run
        with (
            log_to(run.folder / "train.log", enabled=run.is_main),
            reported_end(run, self.interrupts, self.callbacks),
        ):
            restore(run, self.callbacks)
            self.interrupts.defer_signals()  # up to the last line of the report
            self._phase("training")
            run.model.train()
            if run.step:
                self._evaluate_and_save()  # a signal may have come between the last step and its evaluation
            while run.step < run.total_steps and not self._should_stop():
                self.began = time.perf_counter()
                with closing(run.feed.steps(run.step, run.total_steps)) as steps:
                    for epoch, batches in steps:
                        if not self.steps.take(epoch, batches):
                            break  # the same step again, from a feed of smaller micro-batches
                        self._evaluate_and_save()
                        if self._should_stop():
                            break
                self.steps.finish()
            return self._finish()

    def _stepped(self, epoch: float, metrics: StepMetrics) -> None:
        """A step has been read."""
        run, now = self.run, time.perf_counter()
        if run.taken == 0:
            heartbeat.forget()  # the first step compiles and warms up
        metrics.seconds, self.began = now - self.began, now
        run.taken, run.step, run.epoch = run.taken + 1, run.step + 1, epoch
        self.callbacks.tell("on_step", run, metrics)

    def _evaluate_and_save(self) -> None:
        """Where one of both is due, or the run is at its end, the last step is read first."""
        training, at = self.run.config.training, self.steps.started
        evaluation, checkpoint = self._due(training.eval_steps, *at), self._due(training.save_steps, *at)
        if evaluation or checkpoint or at[0] == self.run.total_steps:
            self.steps.finish()
        if self.steps.waiting:
            return
        if evaluation:
            self._evaluate()
        if checkpoint:
            self._save()
        self.began = time.perf_counter()

    def _due(self, every: float | str, step: int, epoch: float) -> bool:
        if every == "end":
            return False
        run = self.run
        if isinstance(every, str):
            times = int(every.partition("/")[0]) if "/" in every else 1
            done = math.ceil(epoch) - 1  # whole epochs before this one
            return ends_part(epoch - done, run.feed.steps_in(done), times)
        return step % steps_between(float(every), run.total_steps) == 0

    def _evaluate(self) -> None:
        run = self.run
        if run.eval_feed is None or run.evaluated == run.step:
            return
        self._phase("evaluating")
        started = time.perf_counter()
        measured = evaluate(run, lambda: self.interrupts.received is not None)
        if measured is None:  # a signal: a resumed run evaluates first
            return
        run.evaluated, metric = run.step, run.config.training.metric_for_best
        loss = measured[metric]
        better = math.isfinite(loss) and (run.best is None or loss < run.best[1])
        if better:
            run.best = (run.step, loss)
        elif not math.isfinite(loss):
            log.warning("%s at step %d is %s: it does not count as the best", metric, run.step, loss)
        self.callbacks.tell("on_evaluate", run, {**measured, "eval_seconds": time.perf_counter() - started})
        barrier(run.processes)
        if better and run.config.training.load_best:
            self._save()
        self._phase("training")

    def _save(self) -> None:
        if self.run.saved == self.run.step:
            return
        self._phase("saving")
        self._check_weights()
        save(self.run, self.callbacks)
        self._phase("training")

    def _check_weights(self) -> None:
        if self.run.device.type == "cpu":
            self.base.check(self.run.folder)
        check_weights(self.run)

    def _should_stop(self) -> bool:
        agreed = self.steps.stopping if self.steps.waiting and self.run.processes > 1 else self._interrupted()
        return bool(self.run.stop) or agreed

    def _interrupted(self) -> bool:
        """Whether any process has received a signal; all of them agree."""
        received = float(self.interrupts.received is not None)
        return sum_over_processes(self.run.accelerator, [received])[0] > 0

    def _finish(self) -> Outcome:
        """The last evaluation and the last checkpoint, then the result, unless a signal has come."""
        run = self.run
        if not self._interrupted():
            self._evaluate()
        if self._interrupted():
            if run.step:
                self._save()
            raise interruption(run, self.interrupts)
        if run.config.training.save_steps != "end":
            self._save()
        self._phase("saving")
        said = [f"trained {run.step} steps", *([f"stopped early: {run.stop}"] if run.stop else []), *load_best(run)]
        self._check_weights()
        write_result(run)
        self._phase("finished")
        outcome = Outcome(run.folder, run.step, f"{', '.join(said)}; the result is in {run.folder / FINAL}")
        log.info(outcome.message, extra=FILE_ONLY)
        return outcome

    def _phase(self, phase: Phase) -> None:
        show_average(self.run.optimizer, self.run.config.training, shown=phase != "training")
        self.callbacks.tell("on_phase", self.run, phase)
