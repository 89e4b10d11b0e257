"""Run folders that somebody else has written: nothing in them starts anything, breaks the list, or is waited for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from halftune.config.sections.training import GenerationSection
from halftune.core.errors import ConfigError, HalftuneError
from halftune.core.files import read_json
from halftune.core.processes.process import identity
from halftune.core.status import Status, read_status
from halftune_webui.labels import load_words
from halftune_webui.runs import queue, start_stop
from halftune_webui.runs.controller import RunsController, View, act, refresh
from halftune_webui.runs.listing import Listing
from halftune_webui.runs.log_tail import log_tail, root_cause
from halftune_webui.runs.started import note_stop, read_started
from halftune_webui.runs.state import look
from halftune_webui.runs.stored import check_model, command, generation_of
from halftune_webui.runs.view.metrics import Metrics
from halftune_webui.runs.view.show import run_card, run_list
from halftune_webui.runs.waiting import waiting
from halftune_webui.settings import Settings

GOOD: dict[str, Any] = {
    "model": {"name_or_path": "builtin:qwen2-tiny"},
    "data": {"train": "builtin:python-docs"},
    "training": {"output_dir": "runs/x"},
}
EVIL = {**GOOD, "model": {"name_or_path": "builtin:qwen2-tiny", "trust_remote_code": True}}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    root = (tmp_path / "work").resolve()
    (root / "runs" / "x").mkdir(parents=True)
    monkeypatch.chdir(root)
    return Settings((root,), root / "runs", program=("/bin/false",))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Commands that would have been started."""
    started: list[tuple[str, ...]] = []

    def start(run: Path, _: Settings) -> None:
        job = read_started(run)
        assert job is not None
        started.append(job.command)

    monkeypatch.setattr(start_stop, "launch", start)
    monkeypatch.setattr(queue, "launch", start)
    return started


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (EVIL, "would run code"),
        ({**GOOD, "data": {"train": "/etc/passwd"}}, "outside the folders"),
        ({**GOOD, "depends_on": ["../../below.yaml"]}, "would run code"),
    ],
)
def test_a_stored_recipe_keeps_within_the_limits(
    settings: Settings, launched: list[Any], recipe: dict[str, Any], said: str
) -> None:
    run = settings.runs / "x"
    Path("below.yaml").write_text(json.dumps(EVIL))
    (run / "resolved.yaml").write_text(json.dumps(recipe))
    with pytest.raises(HalftuneError, match=said):
        start_stop.resume(settings, run)
    (settings.runs / ".webui").mkdir()
    (settings.runs / ".webui" / "queue.json").write_text(json.dumps([str(run)]))
    assert queue.start_next(settings) is None
    assert not launched
    assert not waiting(settings.runs)
    (run / "resolved.yaml").write_text(json.dumps(GOOD))
    start_stop.resume(settings, run)
    assert launched[0][0] == "/bin/false"


def test_chat_and_export_run_no_code_of_a_checkpoint(settings: Settings, tmp_path: Path) -> None:
    run = settings.runs / "x"
    (run / "resolved.yaml").write_text(json.dumps({**GOOD, "data": {"train": "/elsewhere/rows.jsonl"}}))
    check_model(settings, run)  # what it was trained on is not read
    (run / "final").symlink_to(tmp_path)
    with pytest.raises(HalftuneError, match="link that leads out"):
        check_model(settings, run)
    (run / "final").unlink()
    (run / "resolved.yaml").write_text(json.dumps(EVIL))
    with pytest.raises(HalftuneError, match="would run code"):
        check_model(settings, run)


@pytest.mark.parametrize("text", ["", "[", "generation: 3", "generation: {top_p: 7}", "generation: {what: 1}"])
def test_a_chat_begins_with_the_settings_of_the_run(settings: Settings, text: str) -> None:
    run = settings.runs / "x"
    (run / "resolved.yaml").write_text(text)
    assert generation_of(run) == GenerationSection()
    (run / "resolved.yaml").write_text("generation: {max_new_tokens: 48, repetition_penalty: 1.3}")
    assert generation_of(run) == GenerationSection(max_new_tokens=48, repetition_penalty=1.3)


def test_the_queue_starts_no_command_of_a_file(settings: Settings, launched: list[Any]) -> None:
    run = settings.runs / "x"
    (run / "resolved.yaml").write_text(json.dumps(GOOD))
    (run / ".started").mkdir()
    job = {"command": ["sh", "-c", "touch /tmp/pwned"], "cwd": "/etc", "created": 1.0}
    (run / ".started" / "job.json").write_text(json.dumps(job))
    queue.add(settings.runs, run)
    queue.start_next(settings)
    assert launched == [
        ("/bin/false", "train", "--rerun", str(run), f"training.output_dir={run}", "training.resume=auto")
    ]
    noted = read_started(run)
    assert noted is not None
    assert noted.cwd == str(settings.roots[0])


ALIVE = {"state": "running", "phase": "training", "pid": os.getpid(), "process": identity(os.getpid())}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "null",
        json.dumps({**ALIVE, "pid": "<b>"}),
        json.dumps({**ALIVE, "step": None}),
        json.dumps({**ALIVE, "step": "<script>"}),
        json.dumps({**ALIVE, "total": 10**400}),
        json.dumps({**ALIVE, "seconds_left": float("inf")}),
        json.dumps({**ALIVE, "started": 1e300}),
        json.dumps({**ALIVE, "loss": "x", "state": "<img>"}),
        json.dumps({**ALIVE, "phase": "<img src=x>"}),
        json.dumps({**ALIVE, "loss": float("nan")}),
    ],
)
def test_no_status_breaks_the_list(settings: Settings, text: str) -> None:
    run, words = settings.runs / "x", load_words("en")
    (run / "status.json").write_text(text)
    for note in ("job", "process", "exit", "stop"):
        (run / ".started").mkdir(exist_ok=True)
        for broken in ("[1]", '{"created": "x"}', '{"child": 3}', '{"command": [3]}', '{"code": 1e999}', "[" * 99_999):
            (run / ".started" / f"{note}.json").write_text(broken)
            assert look(run).state == "unreadable"
        (run / ".started" / f"{note}.json").unlink()
    (state,) = Listing(settings.runs).look([])
    shown = run_list([state], [run], settings.runs, words) + run_card(state, (), "<i>log", settings.runs, words)
    assert "<img" not in shown
    assert "<script" not in shown
    assert "&lt;i&gt;log" in shown


def test_no_metrics_break_the_curves(settings: Settings) -> None:
    run = settings.runs / "x"
    lines = [
        '{"step": 1, "loss": 2.5, "tokens": 10, "seconds": 2}',
        *('{"step": "1", "loss": 1}', '{"step": NaN, "loss": 1}', '{"step": 1e999, "loss": 1}', "[1]", "[" * 99_999),
        f'{{"step": 2, "loss": 1{"0" * 400}, "memory_bytes": 1{"0" * 400}, "tokens": 1, "seconds": "x"}}',
        '{"step": 3, "loss": "<b>", "grad_norm": [], "seconds": -1, "tokens": 4}',
        '{"step": 4, "loss"',
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    metrics = Metrics(run)
    metrics.update()
    assert list(metrics.series["loss"].steps) == [1, 2, 3]
    assert metrics.series["loss"].values[0] == 2.5
    assert list(metrics.series["tokens_per_second"].values) == [5]
    (run / "status.json").write_text(json.dumps({"state": "running", "phase": "training", "pid": 0}))
    assert look(run).state == "died"


def test_a_line_without_an_end_is_let_go(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halftune_webui.runs.view.metrics._MOST", 1000)
    file = settings.runs / "x" / "metrics.jsonl"
    file.write_text("x" * 5000 + '\n{"step": 7, "loss": 1}\n')
    metrics = Metrics(file.parent)
    looks = 0
    while metrics.update():
        looks += 1
        assert looks < 10
    assert list(metrics.series["loss"].steps) == [7]


def test_no_pipe_is_waited_for_and_nothing_huge_is_read(settings: Settings) -> None:
    run = settings.runs / "x"
    (run / "resolved.yaml").write_text("{}")
    for name in ("status.json", "metrics.jsonl", "train.log"):
        os.mkfifo(run / name)
    assert look(run).state == "unreadable"
    assert not Metrics(run).update()
    with pytest.raises(OSError, match="not a regular file"):
        read_status(run / "status.json")
    (run / "large.json").write_text("1" * 100)
    with pytest.raises(ValueError, match="100 bytes"):
        read_json(run / "large.json", most=99)


@pytest.mark.parametrize("name", ["train.log", ".started/console.log", "status.json", "metrics.jsonl", "report.html"])
def test_no_file_of_a_run_is_read_through_a_link(settings: Settings, tmp_path: Path, name: str) -> None:
    run, secret = settings.runs / "x", tmp_path / "secret"
    secret.write_text('{"step": 7, "loss": 7777.5, "state": "running", "phase": "7777", "pid": 1}\n')
    (run / "resolved.yaml").write_text("{}")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(secret)
    metrics = Metrics(run)
    metrics.update()
    shown = f"{log_tail(run)} {root_cause(run)} {look(run)} {metrics.series}"
    assert "7777" not in shown
    if name == "report.html":
        with pytest.raises(HalftuneError):
            act(RunsController(settings, load_words("en")), View(), "report", str(run), True)


@pytest.mark.parametrize("name", ["x/samples.json", "x/resolved.yaml", ".webui"])
def test_cards_show_nothing_through_a_link(settings: Settings, name: str) -> None:
    controller, view = RunsController(settings, load_words("en")), View()
    other = settings.roots[0] / "other"  # a folder that the web UI may use, and yet not this run's
    other.mkdir()
    answers = {"samples": [{"prompt": "a", "before": "b", "after": "7777"}]}
    (other / "samples.json").write_text(json.dumps(answers))
    (other / "resolved.yaml").write_text("training: {seed: 7777}\n")
    (other / "marks.json").write_text('{"x": {"name": "7777"}}')
    (settings.runs / "y").mkdir()
    for run in ("x", "y"):
        (settings.runs / run / "resolved.yaml").write_text("training: {seed: 1}\n")
    link = settings.runs / name
    link.unlink(missing_ok=True)
    link.symlink_to(other / link.name if link.suffix else other)
    view.show([settings.runs / "x", settings.runs / "y"])
    assert "7777" not in str(refresh(controller, view))


@pytest.mark.parametrize("name", ["resolved.yaml", ".started/config.yaml", ".started"])
def test_a_recipe_is_read_through_no_link(settings: Settings, name: str) -> None:
    run, other = settings.runs / "x", settings.roots[0] / "other"  # inside the web UI's folders, and yet not this run's
    other.mkdir()
    recipe = "model: {name_or_path: secret}\ngeneration: {max_new_tokens: 77}\n"
    for file in ("resolved.yaml", "config.yaml"):
        (other / file).write_text(recipe)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(other / Path(name).name if name.endswith("yaml") else other)
    with pytest.raises(ConfigError, match="symbolic link"):
        act(RunsController(settings, load_words("en")), View(), "edit", str(run), False)
    with pytest.raises(HalftuneError):
        command(settings, run)
    assert generation_of(run) == GenerationSection()
    assert look(run).model == ""


def test_the_notes_of_a_run_are_not_written_through_a_link(settings: Settings, tmp_path: Path) -> None:
    run = settings.runs / "x"
    (tmp_path / "elsewhere").mkdir()
    (run / ".started").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        note_stop(run, 1.0)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_status_is_read_as_it_was_written(settings: Settings) -> None:
    run = settings.runs / "x"
    status = Status(phase="training", step=3, total=9, loss=0.5, seconds_left=2, pid=1, process="a:b", host="h")
    (run / "status.json").write_text(json.dumps(vars(status)))
    assert read_status(run / "status.json") == status
