"""Runs as detached processes: started, queued, stopped, resumed, deleted; with a stand-in for ``halftune train``."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import patience
import pytest

from halftune.core.errors import HalftuneError
from halftune.core.processes.process import identity
from halftune.train.run_folder.lock import locked
from halftune_webui.runs import queue, start_stop
from halftune_webui.runs.log_tail import log_tail
from halftune_webui.runs.started import Process, folder_of, note_job, note_process, read_started
from halftune_webui.runs.state import RunState, look
from halftune_webui.runs.waiting import waiting
from halftune_webui.settings import Settings

# Writes what a run would, then waits to be told: `go` in its folder ends it well, a signal as a run would be ended.
STAND_IN = """
import json, signal, sys, time
from pathlib import Path
import yaml
from halftune.core.status import StatusFile
name = sys.argv[3]
run = Path(name) if sys.argv[2] == "--rerun" else Path(yaml.safe_load(Path(name).read_text())["training"]["output_dir"])
run.mkdir(exist_ok=True)
(run / "resolved.yaml").write_text("{}")
status = StatusFile(run / "status.json")
signal.signal(signal.SIGTERM, lambda *_: (status.tell(state="stopped", error="stopped"), sys.exit(143)))
print(" ".join(sys.argv[1:]), flush=True)
status.tell(phase="training", step=1, total=9)
while not (run / "go").exists():
    time.sleep(0.02)
(run / "finished.json").write_text(json.dumps({"step": 9}))
status.tell(state="finished", phase="finished")
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    script = tmp_path / "train.py"
    script.write_text(STAND_IN)
    monkeypatch.setenv("HALFTUNE_WEBUI_AUTH", "me:secret-one")
    monkeypatch.chdir(tmp_path)
    root = tmp_path.resolve()
    yield Settings((root,), root / "runs", program=(sys.executable, str(script)))
    for run in (root / "runs").glob("*"):  # whatever a failed test has left
        started = read_started(run)
        if started is not None and started.child is not None and started.child.alive:
            os.kill(started.child.pid, signal.SIGKILL)


def recipe(name: str) -> str:
    data = "data: {train: builtin:python-docs}"
    return f"model: {{name_or_path: builtin:qwen2-tiny}}\n{data}\ntraining: {{output_dir: runs/{name}}}\n"


def until(run: Path, wanted: Callable[[RunState], bool]) -> RunState:
    seen: list[RunState] = []

    def reached() -> bool:
        seen[:] = [look(run)]
        return wanted(seen[0])

    patience.until(reached, f"what {run.name} is waited for")
    return seen[0]


def noted_code(run: Path) -> int | None:
    started = read_started(run)
    return None if started is None else started.code


def is_now(state: str) -> Callable[[RunState], bool]:
    return lambda seen: seen.state == state


def test_a_run_is_nobody_s_child_and_its_end_is_noted(settings: Settings) -> None:
    run = start_stop.start(settings, recipe("one"))
    until(run, is_now("running"))
    started = read_started(run)
    assert started is not None
    assert started.child is not None
    assert started.supervisor is not None
    assert os.getsid(started.child.pid) == started.child.pid != os.getsid(0)
    assert os.getsid(started.supervisor.pid) not in (os.getsid(0), started.child.pid)
    variables = Path(f"/proc/{started.child.pid}/environ").read_bytes()
    assert b"secret" not in variables
    (run / "go").touch()
    until(run, is_now("finished"))
    patience.until(lambda: noted_code(run) is not None, "the note of its end")
    assert noted_code(run) == 0
    assert (folder_of(run) / "config.yaml").read_text() == recipe("one")
    with pytest.raises(HalftuneError, match="is finished"):
        start_stop.resume(settings, run)


def test_a_folder_is_used_once(settings: Settings, tmp_path: Path) -> None:
    run = start_stop.start(settings, recipe("one"), wait=False)
    until(run, is_now("running"))
    with pytest.raises(HalftuneError, match="runs/one-2"):
        start_stop.start(settings, recipe("one"))
    other = tmp_path / "runs" / "other"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    with pytest.raises(HalftuneError) as error:
        start_stop.start(settings, recipe("other"))
    assert error.value.code == "train.output_dir_taken"
    with pytest.raises(HalftuneError, match="outside"):
        start_stop.start(settings, recipe("../../elsewhere"))
    assert not list((tmp_path / "runs" / ".webui").glob("*.yaml"))
    start_stop.stop(settings, run)
    until(run, is_now("stopped"))


@pytest.mark.parametrize("left", ["metrics.jsonl", "final", "checkpoint-3", ""])
def test_the_folder_of_a_run_that_never_made_a_step_is_free(settings: Settings, left: str) -> None:
    """It failed before training: the next try need not be called otherwise. What holds a result is kept."""
    run = start_stop.start(settings, recipe("one"), wait=False)
    until(run, is_now("running"))
    start_stop.stop(settings, run)
    until(run, is_now("stopped"))
    (folder_of(run) / "of-the-first-try").touch()
    if left:
        (run / left).mkdir() if "." not in left else (run / left).write_text('{"step": 1, "loss": 1.0}\n')
        with pytest.raises(HalftuneError) as refused:
            start_stop.start(settings, recipe("one"))
        assert "runs/one-2" in str(refused.value)
        assert (folder_of(run) / "of-the-first-try").exists()
        return
    assert start_stop.start(settings, recipe("one") + "# again\n") == run
    assert (folder_of(run) / "config.yaml").read_text().endswith("# again\n")
    assert not (folder_of(run) / "of-the-first-try").exists()
    until(run, is_now("running"))
    start_stop.stop(settings, run)
    until(run, is_now("stopped"))


def test_stop_resume_and_kill(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_stop.start(settings, recipe("one"))
    until(run, is_now("running"))
    with pytest.raises(HalftuneError, match="running or waiting"):
        start_stop.resume(settings, run)
    with pytest.raises(HalftuneError, match="stop it first"):
        start_stop.delete(settings, run)
    sent: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(start_stop, "send", lambda pid, process, number: sent.append(number))
        start_stop.stop(settings, run)
        start_stop.stop(settings, run)  # a double click
        assert sent == [signal.SIGTERM]
    start_stop.stop(settings, run, at_once=True)
    assert until(run, is_now("stopped")).cause == "stopped"
    start_stop.resume(settings, run)
    until(run, is_now("running"))
    assert f"--rerun {run} training.output_dir={run} training.resume=auto" in log_tail(run)
    started = read_started(run)
    assert started is not None
    assert started.child is not None
    os.kill(started.child.pid, signal.SIGKILL)
    assert until(run, lambda seen: seen.state == "died" and noted_code(run) is not None).end == "killed"
    with pytest.raises(HalftuneError, match="does not run"):
        start_stop.stop(settings, run)
    start_stop.delete(settings, run)
    assert not run.exists()
    assert not [left for left in run.parent.iterdir() if left.name != ".webui"]


@pytest.mark.slow
def test_the_queue_goes_on_without_a_web_ui(settings: Settings) -> None:
    first = start_stop.start(settings, recipe("first"))
    until(first, is_now("running"))
    second, third = (start_stop.start(settings, recipe(name), wait=True) for name in ("second", "third"))
    assert waiting(settings.runs) == [second, third]
    assert look(second, waits=True).state == "queued"
    assert queue.start_next(settings) is None  # the first one runs
    start_stop.stop(settings, third)  # taken out again
    assert waiting(settings.runs) == [second]
    assert look(third).state == "stopped"
    start_stop.resume(settings, third, wait=True)
    (first / "go").touch()
    until(second, is_now("running"))  # nobody but the first run's supervisor has looked
    # it writes this when the run is on its way
    patience.until(lambda: waiting(settings.runs) == [third], "only the third one to wait")
    start_stop.start_now(settings, third)
    until(third, is_now("running"))
    for run in (second, third):
        (run / "go").touch()
        until(run, is_now("finished"))


def test_two_web_uis_that_start_a_run_at_once_start_one_after_the_other(settings: Settings) -> None:
    """Neither sees the other's run before its own is in the queue; the queue's lock decides."""
    together = threading.Barrier(2)

    def begin(name: str) -> Path:
        together.wait(patience.LIMIT)
        return start_stop.start(settings, recipe(name), wait=True)

    with ThreadPoolExecutor(2) as web_uis:
        runs = list(web_uis.map(begin, ("one", "two")))
    waits = waiting(settings.runs)
    assert len(waits) == 1
    ahead = next(run for run in runs if run not in waits)
    until(ahead, is_now("running"))
    assert waiting(settings.runs) == waits
    (waits[0] / "go").touch()
    (ahead / "go").touch()
    until(waits[0], is_now("finished"))


def test_two_web_uis_that_start_the_same_recipe_start_it_once(settings: Settings) -> None:
    together = threading.Barrier(2)

    def begin(_: int) -> str:
        together.wait(patience.LIMIT)
        try:
            return start_stop.start(settings, recipe("one"), wait=True).name
        except HalftuneError as error:
            return error.what

    with ThreadPoolExecutor(2) as web_uis:
        said = sorted(web_uis.map(begin, range(2)))
    assert said == ["one", "there is a run in this folder already"]
    run = settings.runs / "one"
    (run / "go").touch()
    until(run, is_now("finished"))


def test_a_run_elsewhere_is_remembered(settings: Settings, tmp_path: Path) -> None:
    text = recipe("one").replace("runs/one", str(tmp_path / "elsewhere"))
    run = start_stop.start(settings, text)
    until(run, is_now("running"))
    from halftune_webui.runs.listing import run_folders

    assert run_folders(settings.runs) == [run]
    (run / "go").touch()
    until(run, is_now("finished"))


def test_nobody_else_s_process_is_signalled(settings: Settings, tmp_path: Path) -> None:
    run = settings.runs / "old"
    run.mkdir(parents=True)
    (run / "resolved.yaml").write_text("{}")
    note_job(run, ["halftune"], tmp_path, time.time())
    mine = Process(os.getpid(), f"{identity(os.getpid())}0", Process.of(os.getpid()).host)  # the number came to us
    note_process(run, mine, mine)
    with pytest.raises(HalftuneError, match="does not run"):
        start_stop.stop(settings, run)


def test_only_runs_under_the_roots_are_touched(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> None:
    foreign = tmp_path_factory.mktemp("foreign")
    (foreign / "resolved.yaml").write_text("{}")
    settings.runs.mkdir(parents=True)
    link = settings.runs / "link"
    link.symlink_to(foreign)
    plain = settings.runs / "plain"
    plain.mkdir()
    for path in (foreign, link, plain, settings.runs, settings.runs / "plain" / ".." / ".." / ".."):
        with pytest.raises(HalftuneError):
            start_stop.delete(settings, path)
        with pytest.raises(HalftuneError):
            start_stop.find(settings, str(path))
    assert (foreign / "resolved.yaml").exists()
    assert plain.exists()


def test_a_run_of_the_command_line_is_not_deleted_while_it_holds_its_lock(settings: Settings) -> None:
    run = settings.runs / "mine"
    run.mkdir(parents=True)
    (run / "resolved.yaml").write_text("{}")
    with locked(run), pytest.raises(HalftuneError, match="another process is training"):
        start_stop.delete(settings, run)
    assert (run / "resolved.yaml").exists()
