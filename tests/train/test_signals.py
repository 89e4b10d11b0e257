"""SIGINT, SIGTERM, SIGHUP at every stage of a run, twice, and ignored; one process at a time in a folder."""

from __future__ import annotations

import json
import os
import pty
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from patience import LIMIT, exit_code
from safetensors.torch import load_file

from halftune.core.errors import ConfigError
from halftune.core.optional import quick_imports
from halftune.data.batch import Batch
from halftune.methods import Reference
from halftune.methods.sft import Sft
from halftune.model.policy.policy import PolicyModel
from halftune.train import finish, trainer
from halftune.train import save_restore as checkpointing
from halftune.train.callbacks.status import ProgressLines
from halftune.train.loop import stepper
from halftune.train.run_folder.checkpoints import newest_valid
from halftune.train.run_folder.lock import check_unlocked, locked
from halftune.train.signals.interrupt import SIGNALS, Interrupted, Interrupts
from halftune.train.state import TrainState
from halftune.train.trainer import train

SETTINGS = (
    "adapter.dropout=0.1",
    "training.save_steps=4",
    "training.max_steps=6",
    "training.logging_steps=4",
    "data.eval_split=8",
    "training.eval_steps=3",
)
UNEQUAL = {"seconds", "eval_seconds", "time", "memory_bytes"}


@pytest.fixture(autouse=True)
def _in_the_foreground() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, nohup with SIGHUP; the program rightly leaves that alone."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    """Runs that several tests look at."""
    return {}


@pytest.fixture
def whole(recipe, made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody stops."""
    if "whole" not in made:
        folder = tmp_path_factory.mktemp("whole") / "run"
        made["whole"] = train(*recipe(*SETTINGS, f"training.output_dir={folder}")).folder
    return made["whole"]


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in UNEQUAL} for line in lines]


def assert_same_end(one: Path, other: Path) -> None:
    a, b = (load_file(folder / "final" / "adapter_model.safetensors") for folder in (one, other))
    assert metrics(one) == metrics(other)
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a)


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    step, now = stepper.start_step, {"step": 0}

    def acting(run: TrainState, batches: Any, **options: Any) -> Any:
        now["step"] += 1
        if now["step"] == number:
            action()
        return step(run, batches, **options)

    monkeypatch.setattr(stepper, "start_step", acting)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: str(value),
)
def test_the_step_is_finished_and_saved(recipe, whole: Path, monkeypatch, number: signal.Signals, code: int) -> None:
    at_step(monkeypatch, 3, lambda: send(number))
    loaded, plan = recipe(*SETTINGS)
    with pytest.raises(Interrupted) as caught:
        train(loaded, plan)
    assert caught.value.exit_code == code
    assert f"stopped by {number.name} after step 3; saved" in str(caught.value)
    folder = Path(loaded.run.training.output_dir)
    assert newest_valid(folder) == folder / "checkpoint-3"
    assert_same_end(train(loaded, plan).folder, whole)


def test_an_evaluation_is_left_and_made_up_for(recipe, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, once = Sft.evaluate, iter([send])

    def acting(self: Sft, policy: PolicyModel, batch: Batch, reference: Reference) -> Any:
        next(once, lambda _: None)(signal.SIGTERM)
        return forward(self, policy, batch, reference)

    monkeypatch.setattr(Sft, "evaluate", acting)
    # two batches of four rows: the signal comes in the first
    loaded, plan = recipe(*SETTINGS, "training.per_device_eval_batch_size=4")
    with pytest.raises(Interrupted, match="after step 3"):
        train(loaded, plan)
    folder = Path(loaded.run.training.output_dir)
    assert not [line for line in metrics(folder) if "eval_loss" in line]
    found, expected = metrics(train(loaded, plan).folder), metrics(whole)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    assert [line.get("loss") for line in found] == [line.get("loss") for line in expected]


def test_before_the_first_step_it_leaves_at_once(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    build = trainer.build

    def slow(*arguments: Any) -> Any:
        send(signal.SIGTERM)
        return build(*arguments)

    monkeypatch.setattr(trainer, "build", slow)
    loaded, plan = recipe("training.max_steps=1")
    with pytest.raises(Interrupted, match=r"stopped by SIGTERM before the first step.*nothing was lost") as caught:
        train(loaded, plan)
    assert caught.value.exit_code == 143
    left = {path.name for path in Path(loaded.run.training.output_dir).iterdir()}
    assert left == {".lock", "status.json"}, "which blocks no other run"
    monkeypatch.undo()
    assert train(loaded, plan).step == 1


def test_the_final_save_is_finished(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    save = finish.save_final

    def acting(*arguments: Any) -> None:
        send(signal.SIGINT)
        save(*arguments)

    monkeypatch.setattr(finish, "save_final", acting)
    folder = train(*recipe("training.max_steps=1")).folder
    assert (folder / "finished.json").exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_was_ignored_from_the_beginning_stays_ignored(recipe, monkeypatch, number: signal.Signals) -> None:
    """Under nohup a terminal that closes ends nothing, nor does Ctrl-C a job that a script has put behind ``&``."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        at_step(monkeypatch, 1, lambda: send(number))
        assert train(*recipe("training.max_steps=2")).step == 2
    finally:
        signal.signal(number, before)


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def child(action: Callable[[], Any]) -> int:
    """Runs something in a forked process; returns its exit code, or minus the signal that ended it."""
    process = os.fork()
    if process == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            action()
        finally:
            os._exit(99)
    return exit_code(process)


def test_a_second_signal_leaves_in_the_middle_of_a_save(recipe, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, plan = recipe(*SETTINGS)
    folder = Path(loaded.run.training.output_dir)

    def impatient() -> None:
        at_step(monkeypatch, 5, lambda: send(signal.SIGINT))
        save = checkpointing.save_checkpoint

        def acting(*arguments: Any) -> Path:
            if arguments[0].step == 5:
                monkeypatch.setattr("halftune.train.checkpoint.checkpoint.seal", lambda *_, **__: send(signal.SIGINT))
            return save(*arguments)

        monkeypatch.setattr(checkpointing, "save_checkpoint", acting)
        train(loaded, plan)

    assert child(impatient) == 130
    assert (folder / ".checkpoint-5.writing" / "trainable.safetensors").exists()
    assert newest_valid(folder) == folder / "checkpoint-4"
    assert_same_end(train(loaded, plan).folder, whole)
    assert not list(folder.glob(".*.writing"))


def test_ctrl_c_while_libraries_are_imported_leaves_at_once() -> None:
    """An import may swallow the exception that Ctrl-C would raise in it."""

    def importing() -> None:
        with quick_imports():
            with suppress(KeyboardInterrupt):
                send(signal.SIGINT)
            os._exit(0)

    assert child(importing) == 130
    with quick_imports():
        assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_terminal_that_closes_takes_no_exit_code_with_it() -> None:
    process, terminal = pty.fork()
    if process == 0:
        try:
            with Interrupts() as interrupts:
                interrupts.defer_signals()
                os.write(1, b"ready")
                while interrupts.received is None:
                    time.sleep(0.01)
                os.write(2, b"last words")  # to a terminal that is no more, this fails
                os._exit(128 + interrupts.received)
        finally:
            os._exit(99)
    assert os.read(terminal, 5) == b"ready"
    os.close(terminal)
    assert exit_code(process) == 128 + signal.SIGHUP


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    """A process that holds ``tmp_path/run``."""
    ready, go = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            with locked(tmp_path / "run"):
                os.write(go, b".")
                time.sleep(LIMIT)
        finally:
            os._exit(1)
    os.read(ready, 1)
    yield process
    os.kill(process, signal.SIGKILL)
    exit_code(process)


def test_a_second_run_is_told_who_is_there(recipe, holder: int) -> None:
    with pytest.raises(ConfigError) as caught:
        train(*recipe())
    assert f"another process is training in this folder: process {holder} on {os.uname().nodename}, since 20" in str(
        caught.value
    )
    assert "choose another training.output_dir" in str(caught.value)


def test_a_second_run_is_refused_before_the_wait_for_torch(tmp_path: Path, holder: int) -> None:
    with pytest.raises(ConfigError, match=f"another process is training in this folder: process {holder} on"):
        check_unlocked(tmp_path / "run")
    check_unlocked(tmp_path / "nowhere")
    with locked(tmp_path / "other"):
        pass
    check_unlocked(tmp_path / "other")


def test_a_killed_owner_blocks_nobody(recipe, tmp_path: Path) -> None:
    def die() -> None:
        with locked(tmp_path / "run"):
            send(signal.SIGKILL)

    assert child(die) == -signal.SIGKILL
    assert str(os.getpid()) not in (tmp_path / "run" / ".lock").read_text()
    assert train(*recipe("training.max_steps=1")).step == 1


def test_a_clock_that_jumps_changes_no_duration(recipe, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    jump, now = 86400.0, {"time": time.time()}

    def jumping() -> float:
        now["time"] -= jump
        return now["time"]

    monkeypatch.setattr(time, "time", jumping)
    caplog.set_level("INFO")
    monkeypatch.setattr("halftune.train.callbacks.chosen", _with_lines())
    folder = train(*recipe("data.eval_split=8", "training.eval_steps=2", "training.max_steps=4")).folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line[name] < jump for line in lines for name in ("seconds", "eval_seconds") if name in line)
    progress = [record.getMessage() for record in caplog.records if "tok/s" in record.getMessage()]
    assert progress
    assert not [line for line in progress if "-" in line.split("tok/s")[1]]


def _with_lines() -> Callable[..., dict[str, dict]]:
    from halftune.train.callbacks import chosen

    assert ProgressLines.watches
    return lambda config, plan: {"progress_lines": {"every": 1}} | chosen(config, plan)
