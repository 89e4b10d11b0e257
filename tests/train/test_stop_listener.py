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
from patience import LIMIT, exit_code, until
from process_group import in_processes, train_all

from halftune.core.processes import heartbeat
from halftune.core.processes.failures import FILE, read
from halftune.train.loop import stepper
from halftune.train.parallel.rendezvous import join_rendezvous
from halftune.train.signals.interrupt import Interrupts
from halftune.train.signals.stop_listener import StopListener
from halftune.train.state import TrainState


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
    return exit_code(process)


class Noted(StopListener):
    """Says when it has heard of the first signal."""

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__(folder, seconds)
        self.heard = threading.Event()

    def _look(self, number: signal.Signals, heard: float) -> None:
        self.heard.set()
        super()._look(number, heard)


@pytest.mark.parametrize(("seconds", "times"), [(0.5, 1), (LIMIT, 2)], ids=["grace", "second signal"])
def test_one_that_hangs_in_a_library_ends(tmp_path: Path, monkeypatch, seconds: float, times: int) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def hangs() -> None:
        listener = Noted(tmp_path, seconds)

        def told() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            if times == 2 and listener.heard.wait(LIMIT):  # two at once would be one
                os.kill(os.getpid(), signal.SIGTERM)

        with Interrupts(listener) as interrupts:
            interrupts.defer_signals()
            threading.Timer(0.1, told).start()
            hangs_in_a_library()

    assert code_of(hangs) == 128 + signal.SIGTERM


def test_what_a_forked_helper_is_told_is_not_for_us(tmp_path: Path) -> None:
    def has_a_helper() -> None:
        listener = Noted(tmp_path, LIMIT)
        with Interrupts(listener) as interrupts:
            interrupts.defer_signals()
            ready, begun = os.pipe()
            helper = os.fork()
            if helper == 0:
                os.write(begun, b"1")
                time.sleep(LIMIT)
            os.read(ready, 1)  # before, Python has not yet told the helper that it is another process
            os.kill(helper, signal.SIGTERM)
            assert exit_code(helper) == 128 + signal.SIGTERM
        for thread in threading.enumerate():
            if thread.name == "stop listener":
                thread.join(LIMIT)  # it has read all that was written for it
        os._exit(7 if interrupts.received is None and not listener.heard.is_set() else 8)

    assert code_of(has_a_helper) == 7


@pytest.mark.slow
def test_two_processes_that_wait_for_each_other_end_and_name_the_checkpoint(recipe, tmp_path: Path) -> None:
    settings = ("training.save_steps=2", "training.per_device_train_batch_size=2", "distributed.stop_seconds=1")
    made = recipe(*settings, world_size=2)
    step, taken = stepper.start_step, list[int]()

    def status() -> dict[str, Any]:
        return json.loads((tmp_path / "run" / "status.json").read_text())

    def hanging(run: TrainState, batches: Any, **options: Any) -> Any:
        taken.append(1)
        if len(taken) == 4:
            heartbeat.forget()  # a slow step before this one would give more time
            join_rendezvous().tell("last step", True)
            if os.environ["RANK"] == "1":
                join_rendezvous().ask("last step", LIMIT)
                for pid in join_rendezvous().ask("pid", LIMIT):
                    os.kill(pid, signal.SIGTERM)
                time.sleep(LIMIT)
        return step(run, batches, **options)

    end = StopListener._end

    def ends_second(*arguments: Any) -> None:
        """As with its head start on a machine that is quick."""
        until(lambda: status()["state"] == "stopped", "the main process has said why it ends")
        end(*arguments)

    def work(rank: int) -> None:
        os.environ[FILE] = str(tmp_path / f"{rank}.json")
        stepper.start_step = hanging
        if rank == 1:
            StopListener._end = ends_second  # pyright: ignore[reportAttributeAccessIssue]
        join_rendezvous().tell("pid", os.getpid())
        train_all([made])(rank)

    assert in_processes(2, work) == [143, 143]
    for rank in range(2):
        record = read(tmp_path / f"{rank}.json")
        assert record is not None
        assert record.stopped
        assert "checkpoint-2" in record.text
    assert status()["state"] == "stopped"
    assert "checkpoint-2" in status()["error"]
