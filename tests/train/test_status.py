"""``status.json``: an outside observer reads phase, step and the cause of an end; a pid alone is never trusted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import LIMIT, until

from halftune.core.errors import TrainingError
from halftune.core.processes.process import identity, send
from halftune.core.status import NAME, StatusFile, read_status
from halftune.train.callback import Callback
from halftune.train.callbacks import status as status_callback
from halftune.train.trainer import Trainer, train


def test_a_run_tells_every_phase_and_its_end(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    tell = StatusFile.tell

    def spy(self: StatusFile, **changes: Any) -> None:
        tell(self, **{**changes, "urgent": True})
        told.append(json.loads(self.path.read_text()))

    monkeypatch.setattr(StatusFile, "tell", spy)
    loaded, plan = recipe("training.max_steps=3")
    train(loaded, plan)
    phases = list(dict.fromkeys(look["phase"] for look in told if look["phase"]))
    assert phases == ["tokenising", "loading", "training", "saving", "finished"]
    assert [look["step"] for look in told if look["loss"] is not None][:3] == [1, 2, 3]
    last = read_status(tmp_path / "run" / NAME)
    assert last is not None
    assert (last.state, last.step, last.total, last.error, last.casts) == ("finished", 3, 3, "", 0)
    assert (last.pid, last.process) == (os.getpid(), identity(os.getpid()))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert last.loss == pytest.approx(lines[-1]["loss"], abs=1e-6)


def test_what_ended_a_run_is_in_the_file(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(Callback):
        def on_step(self, run: Any, metrics: Any) -> None:
            if run.step == 2:
                raise TrainingError("the sky fell", remedy="look up", code="core.disk_full")

    loaded, plan = recipe()
    made = Trainer.__init__

    def with_fault(self: Trainer, *arguments: Any) -> None:
        made(self, *arguments)
        self.callbacks.callbacks.insert(0, Faulty())

    monkeypatch.setattr(Trainer, "__init__", with_fault)
    with pytest.raises(TrainingError):
        train(loaded, plan)
    last = read_status(tmp_path / "run" / NAME)
    assert last is not None
    assert (last.state, last.error, last.step) == ("failed", "the sky fell · look up", 2)


def test_an_error_before_training_is_told_and_the_folder_stays_usable(recipe: Any, tmp_path: Path) -> None:
    loaded, plan = recipe("data.max_length=8")
    with pytest.raises(Exception, match="no rows left"):
        train(loaded, plan)
    last = read_status(tmp_path / "run" / NAME)
    assert last is not None
    assert last.state == "failed"
    assert "no rows left" in last.error
    loaded, plan = recipe("training.max_steps=1")
    train(loaded, plan)
    last = read_status(tmp_path / "run" / NAME)
    assert last is not None
    assert last.state == "finished"


def test_a_disk_that_takes_nothing_stops_nobody(tmp_path: Path) -> None:
    file = StatusFile(tmp_path / "gone" / NAME)
    file.tell(phase="training")
    assert read_status(tmp_path / "gone" / NAME) is None


def test_a_file_that_is_no_status_is_refused(tmp_path: Path) -> None:
    path = tmp_path / NAME
    for text in ("[]", "{}", "3", '{"state": "running"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="not a valid status"):
            read_status(path)


def test_unurgent_news_waits(tmp_path: Path) -> None:
    file = StatusFile(tmp_path / NAME, pause=LIMIT)
    file.tell(phase="training")
    file.tell(urgent=False, step=7)
    first = read_status(file.path)
    file.tell(phase="saving")
    second = read_status(file.path)
    assert first is not None
    assert second is not None
    assert (first.step, second.step) == (0, 7)


def test_a_signal_reaches_only_the_process_that_was_meant() -> None:
    process = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({2 * LIMIT})"])
    try:
        known = identity(process.pid)
        assert known is not None
        assert identity(process.pid) == known
        assert not send(process.pid, known + "0", signal.SIGTERM)  # the number went to another process
        assert process.poll() is None
        assert send(process.pid, known, signal.SIGTERM)
        until(lambda: identity(process.pid) is None, "a zombie, which nobody has asked yet")
        assert not send(process.pid, known, signal.SIGTERM)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGTERM


def test_endings() -> None:
    assert status_callback.ending(KeyboardInterrupt()) == {"state": "stopped", "error": "KeyboardInterrupt", "code": ""}
    assert status_callback.ending(ZeroDivisionError("x"))["error"] == "ZeroDivisionError: x"


def test_a_checkpoint_that_cannot_be_read_is_told(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Trainer) -> None:
        raise TrainingError("cannot read this checkpoint", code="train.checkpoint_damaged")

    monkeypatch.setattr(Trainer, "_restore", fail)
    with pytest.raises(TrainingError):
        train(*recipe())
    last = read_status(tmp_path / "run" / NAME)
    assert last is not None
    assert (last.state, last.error) == ("failed", "cannot read this checkpoint")
