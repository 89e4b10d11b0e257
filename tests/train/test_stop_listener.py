"""A process that does not come to the end of a step ends all the same when it is asked to, wherever it hangs."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_group import in_processes, train_all

from halftune.core.failures import FILE, read
from halftune.train import stepper
from halftune.train.interrupt import Interrupts
from halftune.train.parallel.rendezvous import join_rendezvous
from halftune.train.state import TrainState
from halftune.train.stop_listener import StopListener

LONG = 600.0  # seconds: nobody comes to their end


def hangs_in_a_library() -> None:
    """Python runs no signal handler while its main thread waits for a mutex that it holds itself."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


def code_of(action: Callable[[], Any]) -> int:
    """The exit code of a forked process that does something."""
    process = os.fork()
    if process == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            action()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def told(number: signal.Signals, *moments: float) -> None:
    for seconds in moments:
        threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


@pytest.mark.parametrize(("seconds", "moments"), [(0.5, (0.1,)), (LONG, (0.1, 0.6))], ids=["grace", "second signal"])
def test_one_that_hangs_in_a_library_ends(tmp_path: Path, monkeypatch, seconds: float, moments) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def hangs() -> None:
        with Interrupts(StopListener(tmp_path, seconds)) as interrupts:
            interrupts.defer_signals()
            told(signal.SIGTERM, *moments)
            hangs_in_a_library()

    assert code_of(hangs) == 128 + signal.SIGTERM


def test_what_a_forked_helper_is_told_is_not_for_us(tmp_path: Path) -> None:
    def has_a_helper() -> None:
        with Interrupts(StopListener(tmp_path, 0.2)) as interrupts:
            interrupts.defer_signals()
            helper = os.fork()
            if helper == 0:
                time.sleep(LONG)
            os.kill(helper, signal.SIGTERM)
            os.waitpid(helper, 0)
            time.sleep(1.0)
            os._exit(7 if interrupts.received is None else 8)

    assert code_of(has_a_helper) == 7


@pytest.mark.slow
def test_two_processes_that_wait_for_each_other_end_and_name_the_checkpoint(recipe, tmp_path: Path) -> None:
    settings = ("training.save_steps=2", "training.per_device_train_batch_size=2", "distributed.stop_seconds=1")
    made = recipe(*settings, world_size=2)
    step, taken = stepper.start_step, list[int]()

    def hanging(run: TrainState, batches: Any, **options: Any) -> Any:
        taken.append(1)
        if len(taken) == 4 and os.environ["RANK"] == "1":
            time.sleep(2.0)  # until the other one waits in a sum
            for pid in join_rendezvous().ask("pid", LONG):
                os.kill(pid, signal.SIGTERM)
            time.sleep(LONG)
        return step(run, batches, **options)

    def work(rank: int) -> None:
        os.environ[FILE] = str(tmp_path / f"{rank}.json")
        stepper.start_step = hanging
        join_rendezvous().tell("pid", os.getpid())
        train_all([made])(rank)

    assert in_processes(2, work, timeout=120) == [143, 143]
    for rank in range(2):
        record = read(tmp_path / f"{rank}.json")
        assert record is not None
        assert record.stopped
        assert "checkpoint-2" in record.text
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "stopped"
    assert "checkpoint-2" in status["error"]
