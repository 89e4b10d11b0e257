"""The training loop, from a loaded config to a final adapter or model."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from halftune.config.load import LoadedConfig
from halftune.core.errors import ConfigError, TrainingError
from halftune.core.log import get_logger, log_to
from halftune.model.save import save_final
from halftune.plan import Plan
from halftune.train.callbacks import build as build_callbacks
from halftune.train.callbacks.base import Callback, Phase
from halftune.train.callbacks.nonfinite import check_finite
from halftune.train.checkpoint import PREFIX, load_checkpoint, load_weights, read_state, rotate, save_checkpoint
from halftune.train.feed import Feed
from halftune.train.folder import FINISHED, RunFolder, locked, open_folder, write_intent
from halftune.train.interrupt import Interrupts
from halftune.train.processes import sum_over_processes
from halftune.train.random_state import random_state, restore_random_state
from halftune.train.setup import Session, build
from halftune.train.step import Stepper
from halftune.train.validation import evaluate

log = get_logger(__name__)


class Interrupted(TrainingError):
    """A signal ended the run after a complete step; its checkpoint is saved."""

    def __init__(self, number: signal.Signals, step: int, checkpoint: Path) -> None:
        super().__init__(
            f"stopped by {number.name} after step {step}; saved {checkpoint}",
            remedy="the same command goes on from there",
        )
        self.exit_code = 128 + number


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
    main = os.environ.get("RANK", "0") == "0"
    with locked(Path(loaded.run.training.output_dir)) if main else nullcontext():
        folder = open_folder(loaded)
        if folder.finished:
            step = json.loads((folder.path / FINISHED).read_text())["step"]
            return Outcome(folder.path, step, f"{folder.path} is finished already ({step} steps): nothing to do")
        session = build(loaded, plan, folder.path)
        if folder.resume_from is not None:
            check_same_data(session.feed, folder.resume_from)
        if main:
            write_intent(folder, loaded, session.run.plan, session.data.report)
        return Trainer(session, folder).train()


def data_identity(feed: Feed) -> dict[str, Any]:
    """What must not change while a run goes on: its position in the data is a number of steps."""
    return {"rows_per_step": feed.rows_per_step, "data": feed.fingerprint()}


def check_same_data(feed: Feed, checkpoint: Path) -> None:
    """Refuses to go on with other data or another global batch, before anything in the run folder changes.

    Raises:
        ConfigError: says which of the two differs.
    """
    before, now = read_state(checkpoint)["progress"], data_identity(feed)
    if before["rows_per_step"] != now["rows_per_step"]:
        raise ConfigError(
            f"the run took {before['rows_per_step']} rows a step, now {now['rows_per_step']}",
            where=str(checkpoint),
            remedy="keep per_device_train_batch_size × gradient_accumulation_steps × processes the same",
        )
    if before["data"] != now["data"]:
        raise ConfigError(
            "the training data is not what the run began with",
            where=str(checkpoint),
            remedy="put the files back, or start a new training.output_dir",
        )


class Trainer:
    """Runs a session: steps, and everything periodic through callbacks."""

    def __init__(self, session: Session, folder: RunFolder) -> None:
        self.session, self.folder, self.run = session, folder, session.run
        self.callbacks: list[Callback] = build_callbacks(session.run.config, session.run.plan)
        trained, training = session.trained, session.run.config.training
        self.stepper = Stepper(
            session.accelerator,
            session.wrapped,
            trained.optimizer,
            trained.schedule,
            trained.scaler,
            session.run.plan,
            training.max_grad_norm,
            lambda loss, norm, batches: check_finite(self.run, loss, norm, [batch.inputs for batch in batches]),
        )
        self.last_saved = self.last_evaluated = -1

    def train(self) -> Outcome:
        """The whole run; callbacks are told of its end whatever happens."""
        failure: BaseException | None = None
        try:
            with Interrupts() as self.interrupts, log_to(self.run.folder / "train.log", enabled=self.run.is_main):
                self._restore()
                self._loop()
                return self._finish()
        except BaseException as error:
            failure = error
            raise
        finally:
            self._tell("on_end", failure)

    def _restore(self) -> None:
        run, checkpoint = self.run, self.folder.resume_from
        randoms: list[dict] = []
        if checkpoint is not None:
            state = load_checkpoint(checkpoint, self.session.trained)
            run.step, run.epoch, randoms = state["step"], state["progress"]["epoch"], state["random"]
            run.best = self._best(state["progress"]["best"])
            self.last_saved = run.step
            log.info("going on from %s", checkpoint)
        self._tell("on_start")
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
        began = time.perf_counter()
        for epoch, batches in self.session.feed.steps(run.step, run.total_steps):
            metrics = self.stepper.step(batches)
            metrics.seconds = time.perf_counter() - began
            run.step, run.epoch = run.step + 1, epoch
            self._tell("on_step", metrics)
            if self._due(run.config.training.eval_steps):
                self._evaluate()
            if self._due(run.config.training.save_steps):
                self._save()
            if run.stop or self._interrupted():
                break
            began = time.perf_counter()

    def _due(self, every: int | str) -> bool:
        if every == "end":
            return False
        if every == "epoch":
            return float(self.run.epoch).is_integer()
        return self.run.step % int(every) == 0

    def _evaluate(self) -> None:
        run, feed = self.run, self.session.eval_feed
        if feed is None or self.last_evaluated == run.step:
            return
        self._phase("evaluating")
        started = time.perf_counter()
        loss = evaluate(self.stepper, run.model, feed)
        self.last_evaluated = run.step
        if not math.isfinite(loss):
            log.warning("the evaluation loss at step %d is %s: it does not count as the best", run.step, loss)
        elif run.best is None or loss < run.best[1]:
            run.best = (run.step, loss)
            if run.config.training.load_best:
                self._save()
        self._tell("on_evaluate", {"eval_loss": loss, "eval_seconds": time.perf_counter() - started})
        self._phase("training")

    def _save(self) -> None:
        run = self.run
        if self.last_saved == run.step:
            return
        self._phase("saving")
        progress = {"epoch": run.epoch, "best": run.best, **data_identity(self.session.feed)}
        randoms = gather_object([random_state(run.device)])
        if run.is_main:
            folder = save_checkpoint(run.folder, run.step, self.session.trained, progress, randoms)
            rotate(run.folder, run.config.training.save_total_limit, run.best[0] if run.best else None)
            self._tell("on_save", folder)
        self.session.accelerator.wait_for_everyone()
        self.last_saved = run.step
        self._phase("training")

    def _interrupted(self) -> bool:
        """Whether any process has received a signal; all of them agree."""
        received = float(self.interrupts.received is not None)
        return sum_over_processes(self.session.accelerator, [received])[0] > 0

    def _finish(self) -> Outcome:
        run = self.run
        if self._interrupted():
            self._save()
            number = self.interrupts.received or signal.SIGTERM  # another process was told
            raise Interrupted(number, run.step, run.folder / f"{PREFIX}{run.step}")
        self._evaluate()
        if run.config.training.save_steps != "end":
            self._save()
        if run.config.training.load_best and run.best:
            best = run.folder / f"{PREFIX}{run.best[0]}"
            load_weights(best, run.model)
            log.info("the final result is that of %s (eval loss %.4f)", best.name, run.best[1])
        self._phase("saving")
        if run.is_main:
            self._write_final()
        self.session.accelerator.wait_for_everyone()
        self._phase("finished")
        stopped = f", stopped early: {run.stop}" if run.stop else ""
        return Outcome(run.folder, run.step, f"trained {run.step} steps{stopped}; the result is in {self.folder.final}")

    def _write_final(self) -> None:
        save_final(self.run.model, self.run.tokenizer, self.run.plan, self.folder.final)
        (self.run.folder / FINISHED).write_text(json.dumps({"step": self.run.step, "time": time.time()}))

    def _phase(self, phase: Phase) -> None:
        self._tell("on_phase", phase)

    def _tell(self, event: str, *details: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.run, *details)
