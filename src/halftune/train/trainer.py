"""The training loop, from a loaded config to a final adapter or model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import gather_object

from halftune.config.load import LoadedConfig
from halftune.core.atomic import write_error_remedy
from halftune.core.errors import HalftuneError, TrainingError
from halftune.core.log import FILE_ONLY, get_logger, log_to
from halftune.core.processes import heartbeat
from halftune.core.processes.process import this_process
from halftune.model.files.result import BASE, FINAL, FINISHED, finished_at, write_finished
from halftune.model.result.save import Named, save_final
from halftune.optim import show_average
from halftune.plan import Plan
from halftune.train.callback import Callback, CallbackList, Phase, StepMetrics
from halftune.train.callbacks import build as build_callbacks
from halftune.train.callbacks.status import before_training
from halftune.train.checkpoint.checkpoint import checkpoint_errors, load_checkpoint, load_weights, save_checkpoint
from halftune.train.checkpoint.resume import (
    move_later_checkpoints,
    restore_place,
    warn_changed_steps,
    warn_lost_metrics,
    with_micro_batch,
)
from halftune.train.checkpoint.run_inputs import BaseFiles, warn_other_inputs
from halftune.train.loop.nonfinite import check_weights
from halftune.train.loop.step import evaluate
from halftune.train.loop.stepper import Stepper
from halftune.train.numeric_environment import (
    numeric_environment,
    random_state,
    restore_random_state,
    warn_other_environment,
)
from halftune.train.parallel.processes import barrier, sum_over_processes
from halftune.train.run_folder.checkpoints import PREFIX, find_damage, rotate
from halftune.train.run_folder.folder import RESOLVED, check_exists, completed_message, open_folder, write_intent
from halftune.train.run_folder.lock import locked
from halftune.train.schedule import ends_part, steps_between
from halftune.train.setup import build
from halftune.train.signals.interrupt import Interrupted, Interrupts, format_signal
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


def _with_failed_rank(error: BaseException) -> BaseException:
    from halftune.train.parallel.watchdog import with_failed_rank  # of several processes

    return with_failed_rank(error)


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
        with log_to(run.folder / "train.log", enabled=run.is_main), self._report_end():
            self._restore()
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
                        if self._wanted(*self.steps.started):
                            self.steps.finish()
                        if not self.steps.waiting:
                            self._evaluate_and_save()
                            self.began = time.perf_counter()
                        if self._should_stop():
                            break
                self.steps.finish()
            outcome = self._finish()
            log.info(outcome.message, extra=FILE_ONLY)
            return outcome

    def _stepped(self, epoch: float, metrics: StepMetrics) -> None:
        """A step has been read."""
        run, now = self.run, time.perf_counter()
        if run.taken == 0:
            heartbeat.forget()  # the first step compiles and warms up
        metrics.seconds, self.began = now - self.began, now
        run.taken, run.step, run.epoch = run.taken + 1, run.step + 1, epoch
        self.callbacks.tell("on_step", run, metrics)

    @contextmanager
    def _report_end(self) -> Iterator[None]:
        """Log what ended the run, name a failed rank, and call ``on_end`` of the callbacks."""
        run = self.run
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            # all processes stop together: nobody failed
            failure = error if isinstance(error, Interrupted) or run.processes == 1 else _with_failed_rank(error)
            ours = isinstance(failure, HalftuneError)
            log.error("%s", failure if ours else "ended by", exc_info=error if not ours else None, extra=FILE_ONLY)
            if failure is not error:
                raise failure from error
            raise
        finally:
            self.interrupts.mark_saved()
            self.callbacks.end(run, failure)
            if failure is None or isinstance(failure, Interrupted):
                # no process exits before the main process has written its report
                barrier(run.processes)
                sum_over_processes(run.accelerator, [0.0])  # the store may end with the main process

    def _restore(self) -> None:
        run, checkpoint = self.run, self.run.resume_from
        randoms: list[dict] = []
        if checkpoint is not None:
            state = load_checkpoint(checkpoint, run)
            randoms = state["random"]
            with checkpoint_errors(checkpoint):
                run.feed = with_micro_batch(run.feed, state["micro_batch"])
                restore_place(run, state["stream"])
                self.callbacks.restore(state["callbacks"])
                before = float(state["schedule"]["_last_lr"][0])
            if run.is_main:
                warn_lost_metrics(run.folder, checkpoint, state["callbacks"])
            log.info("resuming from %s", checkpoint)
            run.changes.warn(main=run.is_main)
            warn_other_environment(state["made_with"], numeric_environment(run))
            warn_changed_steps((state["total_steps"], run.total_steps), (before, run.rate))
        if run.is_main:
            move_later_checkpoints(run.folder, run.step)
            self._rotate()  # a kill may have come before
        self.callbacks.tell("on_start", run)
        barrier(run.processes)  # some of them work on the main process alone
        rank = run.accelerator.process_index
        if checkpoint is not None and rank < len(randoms):
            with checkpoint_errors(checkpoint):
                restore_random_state(randoms[rank], run.device)  # last, so that nothing above has drawn from it

    def _should_stop(self) -> bool:
        agreed = self.steps.stopping if self.steps.waiting and self.run.processes > 1 else self._interrupted()
        return bool(self.run.stop) or agreed

    def _evaluate_and_save(self) -> None:
        training, at = self.run.config.training, (self.run.step, self.run.epoch)
        if self._due(training.eval_steps, *at):
            self._evaluate()
        if self._due(training.save_steps, *at):
            self._save()

    def _wanted(self, step: int, epoch: float) -> bool:
        """Whether a step must be read before the next one is started."""
        training = self.run.config.training
        due = self._due(training.eval_steps, step, epoch) or self._due(training.save_steps, step, epoch)
        return due or step == self.run.total_steps

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
        run = self.run
        if run.saved == run.step:
            return
        self._phase("saving")
        self._check_weights()
        randoms = gather_object([random_state(run.device)])
        places = gather_object([run.feed.place(run.step)])
        folder = save_checkpoint(run, randoms, self.callbacks.states(), places)
        if folder is not None:
            self._rotate()
            self.callbacks.tell("on_save", run, folder)
        barrier(run.processes)
        run.saved = run.step
        self._phase("training")

    def _check_weights(self) -> None:
        if self.run.device.type == "cpu":
            self.base.check(self.run.folder)
        check_weights(self.run)

    def _rotate(self) -> None:
        """Remove old checkpoints, except the best one and the one that ``training.resume`` names."""
        run = self.run
        needed = {run.folder / f"{PREFIX}{run.best[0]}"} if run.best else set()
        if run.began:
            needed.add(Path(run.began))
        rotate(run.folder, run.config.training.save_total_limit, needed)

    def _interrupted(self) -> bool:
        """Whether any process has received a signal; all of them agree."""
        received = float(self.interrupts.received is not None)
        return sum_over_processes(self.run.accelerator, [received])[0] > 0

    def _interruption(self) -> Interrupted:
        """What a signal ends the run with, once its step is saved."""
        run = self.run
        if run.step:
            self._save()
        number, receivers = format_signal(gather_object([self.interrupts.answer()]))
        if run.step == 0:
            return Interrupted.before(number, receivers)
        return Interrupted.after(number, run.step, run.folder / f"{PREFIX}{run.step}", receivers)

    def _finish(self) -> Outcome:
        run = self.run
        if not self._interrupted():
            self._evaluate()
        if self._interrupted():
            raise self._interruption()
        if run.config.training.save_steps != "end":
            self._save()
        notes = [f"stopped early: {run.stop}"] if run.stop else []
        self._phase("saving")
        if run.config.training.load_best and run.best:
            notes += self._load_best(run.folder / f"{PREFIX}{run.best[0]}", run.best[1])
        self._check_weights()
        state = run.strategy.result(run.model)
        try:
            if run.is_main:
                self._rotate()
                self._write_final(state)
        finally:  # gathering needs all processes, also those that do not write or cannot
            for _ in state or ():
                pass
        barrier(run.processes)
        self._phase("finished")
        done = ", ".join([f"trained {run.step} steps", *notes])
        return Outcome(run.folder, run.step, f"{done}; the result is in {run.folder / FINAL}")

    def _load_best(self, best: Path, loss: float) -> list[str]:
        run = self.run
        found = find_damage(best, thorough=True, share=(run.accelerator.process_index, run.processes))
        barrier(run.processes)
        if wrong := next(filter(None, gather_object([found])), ""):
            log.warning("%s holds the best weights and is damaged: %s; the result is the last weights", best, wrong)
            return ["the last weights, NOT the best"]
        load_weights(best, run.model)
        metric = run.config.training.metric_for_best
        log.info("the final weights are those of %s (%s %.4f)", best.name, metric, loss)
        return []

    def _write_final(self, state: Named | None) -> None:
        run = self.run
        check_exists(run.folder)
        facts = {BASE: run.inputs["model"]}
        if unmoved := save_final(run.model, run.tokenizer, run.plan, run.folder / FINAL, state, facts):
            what = "%d modules have an adapter that training did not change, first %s"
            log.warning(what, len(unmoved), unmoved[0])
        try:
            write_finished(run.folder, run.step)
        except OSError as error:
            raise TrainingError(
                f"cannot mark the run as finished: {error.strerror}; its result is written",
                where=str(run.folder / FINISHED),
                remedy=f"{write_error_remedy(error)} and run the same command again",
                code="core.cannot_write",
            ) from error

    def _phase(self, phase: Phase) -> None:
        show_average(self.run.optimizer, self.run.config.training, shown=phase != "training")
        self.callbacks.tell("on_phase", self.run, phase)
