"""How a run ends: with its result, with the step at which a signal came, or with an error. All of it is reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.utils import gather_object

from halftune.core.atomic import write_error_remedy
from halftune.core.errors import HalftuneError, TrainingError
from halftune.core.log import FILE_ONLY, get_logger
from halftune.model.files.result import BASE, FINAL, FINISHED, write_finished
from halftune.model.result.save import Named, save_final
from halftune.train.callback import CallbackList
from halftune.train.checkpoint.checkpoint import load_weights
from halftune.train.parallel.processes import barrier, sum_over_processes
from halftune.train.probes import probes_of
from halftune.train.run_folder.checkpoints import PREFIX, find_damage
from halftune.train.run_folder.start_or_resume import check_exists
from halftune.train.save_restore import remove_old
from halftune.train.signals.interrupt import Interrupted, Interrupts, format_signal
from halftune.train.state import TrainState

log = get_logger(__name__)


@contextmanager
def reported_end(run: TrainState, interrupts: Interrupts, callbacks: CallbackList) -> Iterator[None]:
    """Inside ``with``, whatever ends the run is logged, a failed rank is named, and callbacks get ``on_end``."""
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
        interrupts.mark_saved()
        callbacks.end(run, failure)
        if failure is None or isinstance(failure, Interrupted):
            # no process exits before the main process has written its report
            barrier(run.processes)
            sum_over_processes(run.accelerator, [0.0])  # the store may end with the main process


def _with_failed_rank(error: BaseException) -> BaseException:
    from halftune.train.parallel.watchdog import with_failed_rank  # of several processes

    return with_failed_rank(error)


def interruption(run: TrainState, interrupts: Interrupts) -> Interrupted:
    """What a signal ends the run with; its last step is saved."""
    number, receivers = format_signal(gather_object([interrupts.answer()]))
    if run.step == 0:
        return Interrupted.before(number, receivers)
    return Interrupted.after(number, run.step, run.folder / f"{PREFIX}{run.step}", receivers)


def load_best(run: TrainState) -> list[str]:
    """Give the model the best weights where ``training.load_best`` asks for them; what is to be said of the result."""
    if not (run.config.training.load_best and run.best):
        return []
    (step, loss), metric = run.best, run.config.training.metric_for_best
    best = run.folder / f"{PREFIX}{step}"
    found = find_damage(best, thorough=True, share=(run.accelerator.process_index, run.processes))
    barrier(run.processes)
    if wrong := next(filter(None, gather_object([found])), ""):
        log.warning("%s holds the best weights and is damaged: %s; the result is the last weights", best, wrong)
        return ["the last weights, NOT the best"]
    load_weights(best, run.model)
    log.info("the final weights are those of %s (%s %.4f)", best.name, metric, loss)
    return []


def write_result(run: TrainState) -> None:
    """Write the adapter or model, and mark the run as finished; all processes call it together.

    Raises:
        TrainingError: the run folder is gone, or cannot be written.
    """
    probes = probes_of(run)
    state = run.strategy.result(run.model)
    try:
        if run.is_main:
            remove_old(run)
            _write(run, state, probes)
    finally:  # gathering needs all processes, also those that do not write or cannot
        for _ in state or ():
            pass
    barrier(run.processes)


def _write(run: TrainState, state: Named | None, probes: dict[str, str]) -> None:
    check_exists(run.folder)
    facts = {BASE: run.inputs["model"]}
    if unmoved := save_final(run.model, run.tokenizer, run.plan, run.folder / FINAL, state, facts, probes):
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
