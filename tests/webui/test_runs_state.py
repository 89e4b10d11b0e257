"""What the web UI says of a run, from its folder alone: every state, every kind of end, and nobody else's process."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from halftune.core.processes.process import identity
from halftune.core.status import NAME, StatusFile
from halftune_webui.labels import load_words
from halftune_webui.runs.listing import Listing, run_folders
from halftune_webui.runs.log_tail import cause_in, log_tail
from halftune_webui.runs.started import CONSOLE, Process, folder_of, note_exit, note_job, note_process, note_stop
from halftune_webui.runs.state import is_live, look
from halftune_webui.runs.view.show import run_list


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits to be ended."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    yield started
    started.kill()
    started.wait()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "resolved.yaml").write_text("model: {}\n")
    return folder


def status(run: Path, pid: int, **values: Any) -> None:
    file = StatusFile(run / NAME)
    file.tell(pid=pid, process=identity(pid) or "gone", **values)


def started(run: Path, child: int | Process | None = None, *, code: int | None = None, **more: Any) -> None:
    note_job(run, ["halftune", "train"], run, time.time())
    if child is not None:
        found = child if isinstance(child, Process) else Process.of(child)
        note_process(run, Process(1, "gone", found.host), found)
    if code is not None:
        note_exit(run, code, time.time(), out_of_memory=more.get("out_of_memory", False))


GONE = Process(2**22 - 3, "another boot:1", "")


def test_a_living_run_tells_its_phase_and_progress(run: Path, process: subprocess.Popen[bytes]) -> None:
    before = time.time()
    status(run, process.pid, phase="training", step=3, total=9, loss=1.5, seconds_left=1000.0, casts=2)
    seen = look(run)
    assert (seen.state, seen.phase, seen.step, seen.total, seen.loss, seen.casts) == (
        "running",
        "training",
        3,
        9,
        1.5,
        2,
    )
    assert 1000 - (time.time() - before) - 0.01 <= (seen.seconds_left or 0) <= 1000.01  # the file rounds
    assert is_live(run)


def test_a_loss_that_is_no_number_is_told_from_one_that_is_not_known(
    run: Path, process: subprocess.Popen[bytes]
) -> None:
    status(run, process.pid, phase="loading")
    assert look(run).loss is None
    status(run, process.pid, phase="training", step=4)  # gone on from a checkpoint, no step made yet
    (run / "metrics.jsonl").write_text('{"step": 4, "loss": 2.5}\n')
    assert look(run).loss == 2.5
    (run / "metrics.jsonl").write_text('{"step": 4, "loss": null}\n{"step": 4, "eval_loss": 1.0}\n')
    assert math.isnan(look(run).loss or 0)


def test_between_its_end_and_the_note_of_it_a_run_is_finishing(run: Path, process: subprocess.Popen[bytes]) -> None:
    status(run, GONE.pid, phase="training", step=3)
    note_job(run, ["halftune"], run, time.time())
    note_process(run, Process.of(process.pid), GONE)
    assert (look(run).state, look(run).phase, look(run).step) == ("running", "finished", 3)


def test_a_pid_that_another_process_has_now_is_not_the_run(run: Path, process: subprocess.Popen[bytes]) -> None:
    status(run, process.pid, phase="training", step=3)
    tree = json.loads((run / NAME).read_text())
    (run / NAME).write_text(json.dumps({**tree, "process": tree["process"] + "9"}))
    assert look(run).state == "died"
    assert not is_live(run)


def test_a_run_that_has_not_spoken_yet_is_starting(run: Path, process: subprocess.Popen[bytes]) -> None:
    status(run, GONE.pid, state="failed", phase="training", error="of an earlier launch")
    started(run, process.pid)
    assert look(run).state == "starting"
    note_stop(run, time.time())
    assert look(run).state == "stopping"


def test_queued_stopped_finished(run: Path) -> None:
    started(run)
    assert look(run, waits=True).state == "queued"
    assert look(run).state == "stopped"
    status(run, GONE.pid, state="stopped", error="stopped by SIGTERM after step 4")
    started(run, Process(GONE.pid, "gone", ""), code=143)
    seen = look(run)
    assert (seen.state, seen.cause) == ("stopped", "stopped by SIGTERM after step 4")
    (run / "finished.json").write_text('{"step": 9}')
    assert look(run).state == "finished"


@pytest.mark.parametrize(
    ("code", "memory", "end", "cause"),
    [
        (-signal.SIGKILL, False, "killed", ""),
        (-signal.SIGKILL, True, "killed_memory", ""),
        (-signal.SIGSEGV, False, "crashed", "SIGSEGV"),
        (2, False, "", "data.train: no such file · name one"),
    ],
)
def test_a_death_without_a_last_word(run: Path, code: int, memory: bool, end: str, cause: str) -> None:
    status(run, GONE.pid, phase="training", step=5)
    started(run, GONE, code=code, out_of_memory=memory)
    (folder_of(run) / CONSOLE).write_text(
        "=== first\nI step 1\n=== second\nhalftune train: data.train: no such file · name one\n"
    )
    seen = look(run)
    assert (seen.state, seen.end, seen.cause) == ("died", end, cause)


def test_the_last_word_of_this_launch_counts_and_not_that_of_another(run: Path) -> None:
    status(run, GONE.pid, state="failed", error="the disk is full")
    started(run, GONE, code=5)
    assert look(run).cause == "the disk is full"
    status(run, GONE.pid - 1, state="failed", error="of another process")
    (folder_of(run) / CONSOLE).write_text("=== now\nhalftune train: the folder holds another run · choose\n")
    assert look(run).cause == "the folder holds another run · choose"


def test_a_run_of_another_boot_was_ended_by_the_restart(run: Path) -> None:
    status(run, 1, phase="training")
    tree = json.loads((run / NAME).read_text())
    (run / NAME).write_text(json.dumps({**tree, "process": "another-boot:1"}))
    assert look(run).end == "restarted"
    (run / NAME).write_text(json.dumps({**tree, "process": (identity(os.getpid()) or "").partition(":")[0] + ":1"}))
    assert look(run).end == "killed"


def test_a_run_on_another_machine_lives_as_long_as_it_speaks(run: Path) -> None:
    status(run, 1, phase="training", host="elsewhere")
    assert (look(run).state, look(run).host) == ("running", "elsewhere")
    tree = json.loads((run / NAME).read_text())
    (run / NAME).write_text(json.dumps({**tree, "updated": time.time() - 600}))
    assert look(run).state == "died"


@pytest.mark.parametrize("name", [NAME, "plan.json", ".started/job.json"])
def test_damaged_files_are_named(run: Path, name: str) -> None:
    started(run)
    (run / name).write_text("{")
    seen = look(run)
    assert seen.state == "unreadable"
    assert Path(name).name in seen.cause


@pytest.mark.parametrize(
    ("console", "cause"),
    [
        (
            "I loading\nhalftune train: x.yaml:3: no such key · did you mean y?\n",
            "x.yaml:3: no such key · did you mean y?",
        ),
        ("I loading\nx.yaml:3: no · do a\nx.yaml:9: no · do b\n", "x.yaml:3: no · do a\nx.yaml:9: no · do b"),
        ("Traceback\n  File\nRuntimeError: boom\n", "RuntimeError: boom"),
        ("50%\r100%\x1b[0m\n\n", "100%"),
        ("=== 1\nhalftune train: old\n=== 2\n", ""),
        ("", ""),
    ],
)
def test_root_cause(console: str, cause: str) -> None:
    assert cause_in(console) == cause


def test_the_log_is_the_console_and_without_it_the_trainer_s(run: Path) -> None:
    (run / "train.log").write_text("".join(f"line {number}\n" for number in range(20_000)))
    assert log_tail(run, 2) == "line 19998\nline 19999"
    started(run)
    (folder_of(run) / CONSOLE).write_text("10%\r20%\nend")
    assert log_tail(run) == "20%\nend"


def test_listing_finds_nested_and_foreign_runs_and_orders_them(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    for name in ("a", "group/b", "group/deep/c", "waits", ".hidden/d", "a/checkpoint-3/e"):
        (runs / name).mkdir(parents=True, exist_ok=True)
        (runs / name / "resolved.yaml").write_text("{}")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "resolved.yaml").write_text("{}")
    (runs / ".webui").mkdir()
    (runs / ".webui" / "elsewhere.txt").write_text(f"{foreign}\n{tmp_path / 'deleted'}\n")
    status(runs / "group/b", process.pid, phase="training")
    assert set(run_folders(runs)) == {*(runs / name for name in ("a", "group/b", "group/deep/c", "waits")), foreign}
    listing = Listing(runs)
    order = [(state.folder.name, state.state) for state in listing.look([runs / "waits"])]
    assert order[:2] == [("b", "running"), ("waits", "queued")]

    import halftune_webui.runs.listing as module

    asked: list[Path] = []
    real: Callable[..., Any] = module.look
    monkeypatch.setattr(module, "look", lambda folder, **more: asked.append(folder) or real(folder, **more))
    listing.look([runs / "waits"])
    assert asked == [runs / "group/b"]  # only the living are looked at again
    asked.clear()
    process.kill()
    process.wait()
    states = {state.folder.name: state.state for state in listing.look([])}
    assert states["b"] == "died"
    assert states["waits"] != "queued"


def test_a_run_that_depends_on_another_says_that_this_one_is_trained_first(
    run: Path, process: subprocess.Popen[bytes]
) -> None:
    waits, other = run.parent / "waits", run.parent / "other"
    for folder in (waits, other):
        folder.mkdir()
    started(waits, process.pid)
    started(other, os.getpid())
    status(run, process.pid, phase="training")
    states = {state.folder: state for state in Listing(run.parent).look([])}
    assert (states[waits].state, states[waits].phase, states[waits].first) == ("starting", "first", run)
    assert (states[other].state, states[other].phase, states[other].first) == ("starting", "starting", None)
    assert "one is trained first" in run_list(list(states.values()), [], run.parent, load_words("en"))
