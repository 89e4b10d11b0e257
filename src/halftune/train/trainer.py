"""The training loop, from a loaded config to a final adapter or model."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from peft import PeftModel

from halftune.config.load import LoadedConfig
from halftune.core import alive
from halftune.core.atomic import first_aid
from halftune.core.errors import HalftuneError, TrainingError
from halftune.core.launcher import this_process
from halftune.core.log import FILE_ONLY, get_logger, log_to
from halftune.model.save import save_final
from halftune.model.save_pieces import Named
from halftune.plan import Plan
from halftune.train.attempt import Attempts
from halftune.train.callbacks import build as build_callbacks
from halftune.train.callbacks.base import Phase
from halftune.train.callbacks.crowd import Crowd
from halftune.train.callbacks.nonfinite import check_weights
from halftune.train.callbacks.status import before_training
from halftune.train.checkpoint import load_checkpoint, load_weights, save_checkpoint, tensors_of
from halftune.train.checkpoint_list import PREFIX, flaw, rotate
from halftune.train.folder import (
    FINAL,
    FINISHED,
    RunFolder,
    finished_at,
    nothing_to_do,
    open_folder,
    write_finished,
    write_intent,
)
from halftune.train.home import Home
from halftune.train.interrupt import Interrupted, Interrupts, told
from halftune.train.lock import locked
from halftune.train.made_of import UNCHANGED, Changes, check_made_of
from halftune.train.made_with import made_with, say_what_differs
from halftune.train.parallel.barrier import barrier
from halftune.train.parallel.pulse import explained
from halftune.train.parallel.saving import check_shared, write_together
from halftune.train.processes import sum_over_processes
from halftune.train.random_state import random_state, restore_random_state
from halftune.train.resume import (
    agreed,
    check_same_data,
    position,
    say_length,
    say_lost_metrics,
    set_later_aside,
    split_as_before,
    with_micro_batch,
)
from halftune.train.setup import Session, build
from halftune.train.stop_watch import StopWatch

log = get_logger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its folder, the optimizer steps done and one sentence for the user."""

    folder: Path
    step: int
    message: str


def train(loaded: LoadedConfig, plan: Plan) -> Outcome:
    """Trains a run to its end, or goes on with it where its folder holds checkpoints.

    Raises:
        HalftuneError: anything the user can act on; earlier checkpoints are intact.
    """
    main, path = this_process().main, Path(loaded.run.training.output_dir)
    several = plan.batch.world_size > 1
    watch = StopWatch(path, loaded.run.distributed.stop_seconds) if several else None
    with Interrupts(watch) as interrupts, locked(path) if main else nullcontext():
        folder = open_folder(loaded, main=main)
        if folder.finished:
            return Outcome(path, finished_at(path) or 0, nothing_to_do(path))
        with before_training(path) as phase:
            changes = UNCHANGED
            allowed = loaded.run.training.allow_changes

            def settle(plan: Plan, made: dict[str, Any]) -> Plan:
                nonlocal folder, changes
                folder = agreed(folder, plan.batch.world_size)
                if folder.resume_from is None:
                    return plan
                changes = check_made_of(made, allowed, folder.resume_from)
                return split_as_before(plan, folder.resume_from)

            session = build(loaded, plan, path, phase, settle)
            if folder.resume_from is not None:
                here, free = position(session.feed), changes.tokens or "train_data" in allowed
                check_same_data(here, session.run.total_steps, folder.resume_from, other_tokens=free)
            if main:
                write_intent(folder, loaded, session.run.plan, session.data.report)
            if session.strategy.sharded:
                check_shared(session.strategy, path)
        return Trainer(session, folder, interrupts, changes).train()


class Trainer:
    """Runs a session: steps, and everything periodic through callbacks."""

    def __init__(
        self, session: Session, folder: RunFolder, interrupts: Interrupts, changes: Changes = UNCHANGED
    ) -> None:
        self.session, self.folder, self.interrupts, self.run = session, folder, interrupts, session.run
        self.processes = session.accelerator.num_processes
        self.changes = changes
        self.crowd = Crowd(build_callbacks(session.run.config, session.run.plan))
        self.attempts = Attempts(session)
        self.position = position(session.feed)
        self.micro_batch = session.feed.batch.micro_batch  # as planned; memory may ask for less
        self.last_saved = self.last_evaluated = -1
        self.home = Home(session.run) if session.run.is_main else None
        named = self.run.config.training.resume
        self.began = None if named in ("auto", "never") else str(Path(named).resolve())

    def train(self) -> Outcome:
        """The whole run; callbacks are told of its end whatever happens."""
        with log_to(self.run.folder / "train.log", enabled=self.run.is_main):
            failure: BaseException | None = None
            try:
                self._restore()
                self.interrupts.only_note()  # up to the last line of the report
                self._loop()
                outcome = self._finish()
                log.info(outcome.message, extra=FILE_ONLY)
                return outcome
            except BaseException as error:
                failure = explained(error)
                ours = isinstance(failure, HalftuneError)
                log.error("%s", failure if ours else "ended by", exc_info=error if not ours else None, extra=FILE_ONLY)
                if failure is not error:
                    raise failure from error
                raise
            finally:
                self.interrupts.over()
                self.crowd.end(self.run, failure)
                if self.home is not None:
                    self.home.close()
                if failure is None or isinstance(failure, Interrupted):
                    # all are here: none leaves before the main process has written its report, and may still be lost
                    barrier(self.processes)
                    sum_over_processes(self.session.accelerator, [0.0])  # the store may end with the main process

    def _restore(self) -> None:
        run, checkpoint = self.run, self.folder.resume_from
        randoms: list[dict] = []
        if checkpoint is not None:
            state = load_checkpoint(checkpoint, self.session.trained)
            run.step, run.epoch, randoms = state["step"], state["epoch"], state["random"]
            if not self.changes.parts:
                run.best, self.last_evaluated = self._best(state["best"]), state["evaluated"]
            self.last_saved, self.began = run.step, self.began or state["began"]
            self.session.feed = with_micro_batch(self.session.feed, state["micro_batch"])
            self.crowd.restore(state["callbacks"])
            if run.is_main:
                say_lost_metrics(run.folder, checkpoint, state["callbacks"])
            log.info("going on from %s", checkpoint)
            self.changes.say(main=run.is_main)
            say_what_differs(state["made_with"], made_with(run))
            rates = (state["schedule"]["_last_lr"][0], float(self.session.trained.schedule.get_last_lr()[0]))
            say_length((state["total_steps"], run.total_steps), rates)
        if run.is_main:
            set_later_aside(run.folder, run.step)
            rotate(run.folder, run.config.training.save_total_limit, self._needed())  # a kill may have come before
        self.crowd.tell("on_start", run)
        barrier(self.processes)  # some of them work on the main process alone
        if self.home is not None:
            self.home.remember()
        rank = self.session.accelerator.process_index
        if rank < len(randoms):
            restore_random_state(randoms[rank], run.device)  # last, so that nothing above has drawn from it

    def _best(self, best: list[Any] | None) -> tuple[int, float] | None:
        if best is None:
            return None
        if self.run.config.training.load_best and not (self.run.folder / f"{PREFIX}{best[0]}").is_dir():
            log.warning("the best evaluation so far (step %d) was not saved: it does not count for load_best", best[0])
            return None
        return best[0], best[1]

    def _loop(self) -> None:
        """Step, and after each step what is due."""
        run = self.run
        self._phase("training")
        run.model.train()
        if run.step:
            self._what_is_due()  # a signal may have come between the last step and its evaluation
        while run.step < run.total_steps and not self._ends():
            began = time.perf_counter()
            for epoch, batches in self.session.feed.steps(run.step, run.total_steps):
                metrics = self.attempts.take(batches)
                if metrics is None:
                    break  # the same step again, from a feed of smaller micro-batches
                if self.attempts.done == 1:
                    alive.forget()  # the first step compiles and warms up
                metrics.seconds = time.perf_counter() - began
                run.step, run.epoch = run.step + 1, epoch
                if self.home is not None:
                    self.home.follow()
                self.crowd.tell("on_step", run, metrics)
                self._what_is_due()
                if self._ends():
                    break
                began = time.perf_counter()

    def _ends(self) -> bool:
        return bool(self.run.stop) or self._interrupted()

    def _what_is_due(self) -> None:
        training = self.run.config.training
        if self._due(training.eval_steps):
            self._evaluate()
        if self._due(training.save_steps):
            self._save()

    def _due(self, every: int | str) -> bool:
        if every == "end":
            return False
        if every == "epoch":
            return float(self.run.epoch).is_integer()
        return self.run.step % int(every) == 0

    def _evaluate(self) -> None:
        run = self.run
        if self.session.eval_feed is None or self.last_evaluated == run.step:
            return
        self._phase("evaluating")
        started = time.perf_counter()
        loss = self.attempts.evaluate(lambda: self.interrupts.received is not None)
        if loss is None:  # a signal: whoever goes on from this step evaluates first
            return
        self.last_evaluated = run.step
        better = math.isfinite(loss) and (run.best is None or loss < run.best[1])
        if better:
            run.best = (run.step, loss)
        elif not math.isfinite(loss):
            log.warning("the evaluation loss at step %d is %s: it does not count as the best", run.step, loss)
        self.crowd.tell("on_evaluate", run, {"eval_loss": loss, "eval_seconds": time.perf_counter() - started})
        barrier(self.processes)
        if better and run.config.training.load_best:
            self._save()
        self._phase("training")

    def _save(self) -> None:
        run = self.run
        if self.last_saved == run.step:
            return
        self._phase("saving")
        check_weights(run)
        randoms = gather_object([random_state(run.device)])
        trained, strategy = self.session.trained, self.session.strategy
        write = partial(write_together, strategy, plain=isinstance(run.model, PeftModel)) if strategy.sharded else None
        if self.home is None:
            if write is not None:
                write(None, tensors_of(trained)[0])
        else:
            folder = save_checkpoint(self.home.insist(), run.step, trained, self._facts(randoms), write)
            rotate(run.folder, run.config.training.save_total_limit, self._needed())
            self.crowd.tell("on_save", run, folder)
        barrier(self.processes)
        self.last_saved = run.step
        self._phase("training")

    def _needed(self) -> set[Path]:
        """Checkpoints that are asked for again: of the best evaluation, and the one that ``resume`` names."""
        best = {self.run.folder / f"{PREFIX}{self.run.best[0]}"} if self.run.best else set()
        return best | ({Path(self.began)} if self.began else set())

    def _facts(self, randoms: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "epoch": self.run.epoch,
            "best": self.run.best,
            "evaluated": self.last_evaluated,
            "position": self.position,
            "micro_batch": [self.micro_batch, self.session.feed.batch.micro_batch],
            "random": randoms,
            "callbacks": self.crowd.states(),
            "made_with": made_with(self.run),
            "made_of": self.run.made_of,
            "total_steps": self.run.total_steps,
            "began": self.began,
        }

    def _interrupted(self) -> bool:
        """Whether any process has received a signal; all of them agree."""
        received = float(self.interrupts.received is not None)
        return sum_over_processes(self.session.accelerator, [received])[0] > 0

    def _finish(self) -> Outcome:
        run = self.run
        if not self._interrupted():
            self._evaluate()
        if self._interrupted():
            if run.step:
                self._save()
            number, whom = told(gather_object([self.interrupts.answer()]))
            if run.step == 0:
                raise Interrupted.before(number, whom)
            raise Interrupted.after(number, run.step, run.folder / f"{PREFIX}{run.step}", whom)
        if run.config.training.save_steps != "end":
            self._save()
        notes = [f"stopped early: {run.stop}"] if run.stop else []
        if run.config.training.load_best and run.best:
            notes += self._load_best(run.folder / f"{PREFIX}{run.best[0]}", run.best[1])
        self._phase("saving")
        check_weights(run)
        state = self.session.strategy.result(run.model)
        try:
            if self.home is not None:
                rotate(run.folder, run.config.training.save_total_limit, self._needed())
                self._write_final(self.home.insist(), state)
        finally:  # gathering needs all processes, also those that do not write or cannot
            for _ in state or ():
                pass
        barrier(self.processes)
        self._phase("finished")
        done = ", ".join([f"trained {run.step} steps", *notes])
        return Outcome(run.folder, run.step, f"{done}; the result is in {run.folder / FINAL}")

    def _load_best(self, best: Path, loss: float) -> list[str]:
        found = flaw(best, thorough=True, share=(self.session.accelerator.process_index, self.processes))
        barrier(self.processes)
        if wrong := next(filter(None, gather_object([found])), ""):
            log.warning("%s holds the best weights and is damaged: %s; the result is the last weights", best, wrong)
            return ["NOT the best weights but the last ones"]
        load_weights(best, self.run.model)
        log.info("the final result is that of %s (eval loss %.4f)", best.name, loss)
        return []

    def _write_final(self, folder: Path, state: Named | None) -> None:
        save_final(self.run.model, self.run.tokenizer, self.run.plan, folder / FINAL, state)
        try:
            write_finished(folder, self.run.step)
        except OSError as error:
            raise TrainingError(
                f"the result is written, but not that the run is finished: {error.strerror}",
                where=str(folder / FINISHED),
                remedy=f"{first_aid(error)} and run the same command again",
            ) from error

    def _phase(self, phase: Phase) -> None:
        self.crowd.tell("on_phase", self.run, phase)
