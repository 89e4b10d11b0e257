"""Callbacks: what they write, what they keep when a run goes on, and that none of them can hurt the training."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from live_state import live_state
from rich.console import Console
from torch import nn

from halftune.attention.contract import AttentionPlan
from halftune.config.run import RunConfig
from halftune.core.choice import Choice
from halftune.core.errors import MissingPackageError, TrainingError
from halftune.plan import BatchPlan, MemoryPlan, Plan
from halftune.precision import PrecisionPlan
from halftune.train import callbacks
from halftune.train.callback import CallbackList, StepMetrics
from halftune.train.callbacks import samples as samples_module
from halftune.train.callbacks.early_stopping import EarlyStopping
from halftune.train.callbacks.environment import Environment
from halftune.train.callbacks.high_loss import HighLoss
from halftune.train.callbacks.metrics import MetricsFile
from halftune.train.callbacks.samples import Samples
from halftune.train.callbacks.status import Pace, ProgressBar, ProgressLines
from halftune.train.callbacks.trackers import accelerate as trackers
from halftune.train.callbacks.trackers.logger import Logger, tree
from halftune.train.callbacks.trackers.tensorboard import TensorBoard
from halftune.train.callbacks.trackers.wandb import WeightsAndBiases
from halftune.train.parallel.strategy import Strategy
from halftune.train.state import TrainState

MakeRun = Callable[..., TrainState]


def a_plan(*, scaler: bool = False) -> Plan:
    word: Any = Choice("fp32", "test")
    no, nothing = Choice(False, "test"), Choice("none", "test")
    precision = PrecisionPlan(
        word,
        word,
        word,
        no,
        Choice(scaler, "test"),
        word,
        word,
        word,
        Choice((), "test"),
        no,
    )
    attention = AttentionPlan(Choice("sdpa", "test"), Choice("torch", "test"), nothing, nothing, (), "cast")
    memory = MemoryPlan(1, 1, 1, 1, 1, 1, available=10, checkpoint_disk=1, verdict=Choice("fits", "test"))
    batch = BatchPlan(1, 1, 1, 8, no, no)
    cpu, one = Choice("cpu", "test"), Choice("single", "test")
    return Plan(cpu, precision, attention, batch, memory, one, Choice(1, "test"), Choice(1, "test"))


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """``make_run(step=4, logging={...})``: a run of 20 steps, 10 in an epoch, whose other arguments are sections."""

    def make(
        step: int = 0, *, model: nn.Module | None = None, scaler: bool = False, **sections: dict[str, Any]
    ) -> TrainState:
        (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        values: dict[str, Any] = {
            "model": {"name_or_path": "builtin:qwen2-tiny"},
            "data": {"train": str(tmp_path / "rows.jsonl")},
            "training": {"output_dir": str(folder), **sections.pop("training", {})},
            **sections,
        }
        config, plan = RunConfig.model_validate(values), a_plan(scaler=scaler)
        model = nn.Linear(2, 2) if model is None else model
        made = {
            "model": {"commit": "c0ffee"},
            "tokenizer": {},
            "template": "",
            "train_data": ["ab" * 32],
            "eval_data": [],
        }
        parts = {"config": config, "plan": plan, "folder": folder, "model": model, "inputs": made}
        parts["strategy"] = Strategy(cast(Any, None), plan)
        return live_state(**parts, step=step, epoch=step / 10)

    return make


def measured(loss: float = 2.0, *, trained: int = 100, norm: float = 1.0, **extra: float) -> StepMetrics:
    return StepMetrics(loss, 1e-4, norm, 400, 300, trained, 0.5, 1_000_000, extra, weight=trained)


def advance(callback: Any, run: TrainState, *metrics: StepMetrics) -> None:
    for numbers in metrics:
        run.step, run.epoch = run.step + 1, (run.step + 1) / run.steps_per_epoch
        callback.on_step(run, numbers)


def lines_of(run: TrainState) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def test_every_name_of_the_table_is_chosen_by_some_configuration(make_run: MakeRun, monkeypatch: Any) -> None:
    sections = {
        "logging": {
            "report_to": ["tensorboard", "wandb", "mlflow", "swanlab", "trackio"],
            "sample_prompts": ["hi"],
            "profile": 2,
        },
        "training": {"early_stopping_patience": 2, "stop_above_loss": 9},
        "method": {"type": "grpo", "rewards": ["exact_answer"], "max_completion_length": 16},
    }
    run = make_run(scaler=True, **sections)  # type: ignore[arg-type]
    names: set[str] = set()
    for terminal in (True, False):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal, raising=False)
        built = callbacks.build(run.config, run.plan)
        names |= set(callbacks.chosen(run.config, run.plan))
        assert [type(one).__name__ for one in built[-2:]] == ["Report", "StatusLine"]  # it reads what others write
    assert names == set(callbacks.CALLBACKS)


def test_progress_false_is_silent(make_run: MakeRun) -> None:
    names = callbacks.chosen(make_run(logging={"progress": False}).config, a_plan())
    progress = {name: more for name, more in names.items() if name.startswith("progress")}
    assert progress == {"progress_lines": {"every": 1, "shown": False}}, "the run's log only"


def test_metrics_line_has_the_contract_and_is_on_disk_at_once(make_run: MakeRun) -> None:
    run, callback = make_run(), MetricsFile(1)
    callback.on_start(run)
    advance(callback, run, measured(2.5, loss_scale=4.0))
    (line,) = lines_of(run)
    assert line.pop("time") > 1e9
    assert line == {
        "step": 1,
        "epoch": 0.1,
        "loss": 2.5,
        "learning_rate": 1e-4,
        "grad_norm": 1.0,
        "tokens": 400,
        "tokens_real": 300,
        "tokens_trained": 100,
        "seconds": 0.5,
        "memory_bytes": 1_000_000,
        "loss_scale": 4.0,
    }
    callback.on_evaluate(run, {"eval_loss": 2.25, "eval_seconds": 0.1})
    line = lines_of(run)[1]
    assert (line["step"], line["eval_loss"], "loss" in line) == (1, 2.25, False)


def test_losses_of_a_window_are_weighted_by_trained_tokens(make_run: MakeRun) -> None:
    run, callback = make_run(), MetricsFile(2)
    callback.on_start(run)
    advance(callback, run, measured(1.0, trained=300), measured(3.0, trained=100, skipped=1.0), measured(7.0))
    (line,) = lines_of(run)
    assert (line["step"], line["loss"], line["tokens"], line["seconds"], line["skipped"]) == (2, 1.5, 800, 1.0, 1.0)
    callback.on_end(run, None)  # step 3 is not lost
    assert [(line["step"], line["loss"]) for line in lines_of(run)] == [(2, 1.5), (3, 7.0)]


def test_window_without_any_label_and_with_numbers_that_json_does_not_know(make_run: MakeRun) -> None:
    run, callback = make_run(), MetricsFile(1)
    callback.on_start(run)
    advance(callback, run, measured(0.0, trained=0, norm=float("inf")))
    assert "Infinity" not in (run.folder / "metrics.jsonl").read_text()
    assert (lines_of(run)[0]["loss"], lines_of(run)[0]["grad_norm"]) == (0.0, None)


def test_lines_after_the_restored_step_are_dropped(make_run: MakeRun) -> None:
    run, callback = make_run(), MetricsFile(1)
    callback.on_start(run)
    advance(callback, run, *[measured(float(i)) for i in range(5)])
    callback.on_evaluate(run, {"eval_loss": 1.0})
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the process was killed here
    again, callback = make_run(step=3), MetricsFile(1)
    callback.on_start(again)
    advance(callback, again, measured(9.0))
    assert [(line["step"], line["loss"]) for line in lines_of(again)] == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 9.0)]


def test_run_from_the_start_forgets_an_older_one(make_run: MakeRun) -> None:
    for _ in range(2):
        run, callback = make_run(), MetricsFile(1)
        callback.on_start(run)
        advance(callback, run, measured(), measured())
    assert [line["step"] for line in lines_of(run)] == [1, 2]


def test_other_processes_write_nothing(make_run: MakeRun) -> None:
    run, callback = make_run(), MetricsFile(1)
    run.is_main = False
    callback.on_start(run)
    advance(callback, run, measured())
    callback.on_end(run, None)
    assert not list(run.folder.iterdir())


def test_metrics_that_cannot_be_written_wait_until_they_can(make_run: MakeRun, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(logging.getLogger("halftune"), "propagate", True)
    run, callback = make_run(), MetricsFile(1)
    callback.on_start(run)
    (run.folder / "metrics.jsonl").mkdir()  # in the place of a disk that takes nothing
    advance(callback, run, measured(1.0), measured(2.0))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"cannot write {run.folder / 'metrics.jsonl'}"
    ]
    (run.folder / "metrics.jsonl").rmdir()
    advance(callback, run, measured(3.0))
    assert [line["loss"] for line in lines_of(run)] == [1.0, 2.0, 3.0]
    callback.on_end(run, None)
    assert len(caplog.records) == 1


def test_steps_between_two_lines_outlive_the_process(make_run: MakeRun) -> None:
    """Saved at step 4, killed at step 6, with a line every three steps."""
    whole, callback = make_run(), MetricsFile(3)
    callback.on_start(whole)
    advance(callback, whole, *[measured(float(i)) for i in range(4)])
    kept = json.loads(json.dumps(callback.state()))
    advance(callback, whole, measured(4.0), measured(5.0))
    expected = lines_of(whole)
    run, again = make_run(step=4), MetricsFile(3)
    again.restore(kept)
    again.on_start(run)
    advance(again, run, measured(4.0), measured(5.0))
    strip = lambda lines: [{k: v for k, v in line.items() if k != "time"} for line in lines]  # noqa: E731
    assert strip(lines_of(run)) == strip(expected)
    assert [line["step"] for line in expected] == [3, 6]


def test_bar_shows_the_numbers_and_gives_log_messages_back(make_run: MakeRun, capsys: Any) -> None:
    console = Console(stderr=True, force_terminal=True, width=120, color_system=None)
    handler = logging.StreamHandler()
    logger = logging.getLogger("halftune")
    logger.addHandler(handler)
    stream = handler.stream
    try:
        run, callback = make_run(), ProgressBar(console)
        callback.on_start(run)
        callback.on_phase(run, "training")
        assert handler.stream is not stream  # rich's stand-in, which writes above the bar
        advance(callback, run, measured(2.34567), measured(1.23456))
        run.best = (2, 1.5)
        callback.on_evaluate(run, {"eval_loss": 1.5})
        callback.on_end(run, None)
        assert handler.stream is stream
    finally:
        logger.removeHandler(handler)
    shown = capsys.readouterr().err
    for words in ("training", "2/20", "loss 1.235", "lr 1.00e-4", "norm 1.00", "tok/s 800 all, 600 real, 200 trained"):
        assert words in shown, words
    assert "977 KiB" in shown
    assert "step 2 · eval loss 1.500 (best so far)" in shown


def test_bar_survives_an_end_before_its_start(make_run: MakeRun) -> None:
    ProgressBar().on_end(make_run(), TrainingError("no disk", code="core.disk_full"))


def test_plain_lines_come_at_a_sane_rate(make_run: MakeRun, monkeypatch: Any, caplog: Any) -> None:
    now = [100.0]
    monkeypatch.setattr("halftune.train.callbacks.status.time.monotonic", lambda: now[0])
    monkeypatch.setattr(logging.getLogger("halftune"), "propagate", True)
    run, callback = make_run(), ProgressLines(2)
    run.total_steps = 200
    with caplog.at_level("INFO", logger="halftune"):
        for _ in range(200):
            now[0] += 0.25
            advance(callback, run, measured())
    said = [record.getMessage() for record in caplog.records]
    steps = [int(words.split()[1].split("/")[0]) for words in said]
    assert steps[0] == 2
    assert steps[-1] == 200
    assert all(step % 2 == 0 for step in steps)
    assert all(after - before >= 8 for before, after in pairwise(steps[:-1]))  # 2 seconds
    assert "loss 2.000 · lr 1.00e-4 · norm 1.00 · tok/s 800 all, 600 real, 200 trained · 977 KiB · ETA 0:" in said[1]


def test_time_left_ignores_the_warm_up() -> None:
    pace = Pace()
    assert pace.left(5, 20, now=1000.0) is None
    assert pace.left(7, 20, now=1004.0) == 26.0


def test_early_stopping_counts_evaluations_since_the_best(make_run: MakeRun) -> None:
    run, callback = make_run(), EarlyStopping(patience=2)
    run.best = (5, 1.25)
    for step, stops in ((5, False), (10, False), (15, True)):
        run.step = step
        callback.on_evaluate(run, {"eval_loss": 2.0})
        assert bool(run.stop) is stops
    assert "1.25" in run.stop
    assert "step 5" in run.stop
    again, later = EarlyStopping(patience=2), make_run(step=15)
    again.restore(callback.state())
    later.best = run.best
    again.on_start(later)
    assert later.stop == run.stop  # a run that had stopped stays stopped
    patient, later.stop = EarlyStopping(patience=3), ""
    patient.restore(callback.state())
    patient.on_start(later)
    assert not later.stop


def test_a_high_loss_stops_after_steps_in_a_row(make_run: MakeRun) -> None:
    run, callback = make_run(), HighLoss(above=5.0, steps=2)
    for loss, stops in ((6.0, False), (4.0, False), (6.0, False), (7.0, True)):
        callback.on_step(run, measured(loss))
        assert bool(run.stop) is stops
    again, later = HighLoss(above=5.0, steps=2), make_run()
    again.restore(callback.state())
    again.on_start(later)
    assert later.stop == run.stop


@pytest.mark.parametrize("sharded", [False, True])
def test_samples_that_fail_end_a_run_only_where_others_wait_for_them(make_run: MakeRun, monkeypatch, sharded) -> None:
    """One process has left the others in the middle of a forward pass where each holds a share of the weights."""

    def fails(*_: Any, **__: Any) -> str:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(samples_module, "generate_reply", fails)
    monkeypatch.setattr(TrainState, "sharded", sharded)
    crowd, run = CallbackList([Samples()]), make_run(logging={"sample_prompts": ["one"]})
    if sharded:
        with pytest.raises(RuntimeError, match="out of memory"):
            crowd.tell("on_start", run)
    else:
        crowd.tell("on_start", run)
        assert crowd.failures["Samples"][0] == 1


def test_samples_before_and_after(make_run: MakeRun, monkeypatch: Any) -> None:
    asked: list[Any] = []

    def reply(model: Any, tokenizer: Any, messages: list, generation: Any, plan: Any, **_: Any) -> str:
        asked.append(messages)
        return f"{torch.rand(()).item():.6f} {len(asked)}"

    monkeypatch.setattr(samples_module, "generate_reply", reply)
    prompts = {"sample_prompts": ["one", "two"]}
    run = make_run(logging=prompts, data={"train": "x", "system": "Be brief."})
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    callback = Samples()
    callback.on_start(run)
    assert torch.equal(torch.rand(3), expected)  # the run's random stream was not touched
    before = json.loads((run.folder / "samples.json").read_text())["samples"]
    assert [row["prompt"] for row in before] == ["one", "two"]
    assert asked[0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    # the run is interrupted and goes on: the first answers stay, nothing is asked again
    again, callback = make_run(step=7, logging=prompts), Samples()
    callback.on_start(again)
    assert len(asked) == 2
    callback.on_phase(again, "training")
    assert len(asked) == 2
    callback.on_phase(again, "finished")
    rows = json.loads((run.folder / "samples.json").read_text())["samples"]
    assert [row["before"] for row in rows] == [row["before"] for row in before]
    assert [row["after"].split()[1] for row in rows] == ["3", "4"]
    assert rows[0]["after"].split()[0] == before[0]["before"].split()[0]  # the same stream before and after


def test_environment_names_versions_machine_commit_and_data(make_run: MakeRun) -> None:
    run = make_run()
    Environment().on_start(run)
    facts = json.loads((run.folder / "environment.json").read_text())
    assert (
        facts["packages"]["torch"] == torch.__version__.split("+")[0] or facts["packages"]["torch"] == torch.__version__
    )
    assert facts["hardware"]["devices"][0]["memory_bytes"] > 0
    (path,) = facts["data"]
    assert path.endswith("rows.jsonl")
    assert facts["data"][path] == "ab" * 32
    assert facts["model"] == {"commit": "c0ffee"}


def test_tensorboard_gets_every_number(make_run: MakeRun) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, callback = make_run(), TensorBoard(1)
    callback.on_start(run)
    advance(callback, run, measured(2.0, norm=float("nan")), measured(1.0))
    callback.on_evaluate(run, {"eval_loss": 1.5, "eval_seconds": 0.1})
    callback.on_end(run, None)
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert [event.step for event in events.Scalars("train/grad_norm")] == [2]  # NaN is no number
    assert events.Scalars("speed/tokens_trained")[0].value == 200
    assert events.Scalars("eval/loss")[0].value == 1.5
    assert "configuration/text_summary" in events.Tags()["tensors"]


@pytest.mark.parametrize("kind", [TensorBoard, WeightsAndBiases])
def test_a_logger_writes_through_no_link(make_run: MakeRun, kind: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: pytest.fail("called"), Error=OSError))
    pytest.importorskip("tensorboard")
    run, callback = make_run(), kind(1)
    (tmp_path / "elsewhere").mkdir()
    (run.folder / callback.name).symlink_to(tmp_path / "elsewhere")
    callback.on_start(run)
    assert not callback.on
    assert not list((tmp_path / "elsewhere").iterdir())


class _Broken(Logger):
    name = "broken"

    def __init__(self) -> None:
        super().__init__(1)
        self.sent = 0

    def open(self, run: TrainState) -> None:
        pass

    def send(self, step: int, numbers: dict[str, float]) -> None:
        self.sent += 1
        raise ConnectionError("the server is gone")

    def close(self, failed: bool) -> None:
        raise AssertionError("a logger that is off is not closed")


def test_logger_that_fails_is_switched_off_with_one_warning(make_run: MakeRun, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(logging.getLogger("halftune"), "propagate", True)
    run, callback = make_run(), _Broken()
    callback.on_start(run)
    advance(callback, run, measured(), measured(), measured())
    callback.on_evaluate(run, {"eval_loss": 1.0})
    callback.on_end(run, None)
    assert callback.sent == 1
    assert [record.getMessage() for record in caplog.records] == [
        "broken is off for the rest of the run: ConnectionError: the server is gone",
        "broken has nothing of what came after step 1",
    ]


def test_missing_logger_says_how_to_get_it(make_run: MakeRun, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(MissingPackageError, match=r'report_to.*pip install "wandb'):
        WeightsAndBiases(1).on_start(make_run())


def test_wandb_run_is_continued(make_run: MakeRun, monkeypatch: Any) -> None:
    started: list[dict[str, Any]] = []

    class Fake:
        id = "abc123"
        Error = KeyError

        def log(self, numbers: dict[str, float], step: int) -> None:
            assert numbers["train/loss"] == 2.0

        def finish(self, exit_code: int) -> None:
            started[-1]["exit_code"] = exit_code

        @classmethod
        def init(cls, **arguments: Any) -> Fake:
            started.append(arguments)
            return cls()

    monkeypatch.setitem(__import__("sys").modules, "wandb", Fake)
    for step in (0, 4):
        run, callback = make_run(step=step), WeightsAndBiases(1)
        callback.on_start(run)
        advance(callback, run, measured())
        callback.on_end(run, None if step else TrainingError("x", code="core.disk_full"))
    assert [(call["id"], call["resume"], call["exit_code"]) for call in started] == [
        (None, None, 1),
        ("abc123", "allow", 0),
    ]
    assert started[0]["name"] == "run"


CONTINUED = {
    "MLflow": {"run_id": "abc123", "run_name": None},
    "SwanLab": {"id": "abc123", "resume": "allow", "experiment_name": "run"},
    "Trackio": {"name": "abc123", "resume": "must"},
}


@pytest.mark.parametrize("kind", CONTINUED)
def test_tracker_run_is_continued(make_run: MakeRun, monkeypatch: Any, kind: str) -> None:
    made: list[tuple[str, dict[str, Any]]] = []
    numbers: list[tuple[int, float]] = []
    run_of_tracker = SimpleNamespace(info=SimpleNamespace(run_id="abc123"), id="abc123", name="abc123")

    class Fake:
        tracker = run_of_tracker

        def __init__(self, project: str, **more: Any) -> None:
            made.append((project, more))

        def start(self) -> None: ...

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            assert values["training.max_steps"] is None
            made[-1][1]["stored"] = True

        def log(self, values: dict[str, float], step: int) -> None:
            numbers.append((step, values["train/loss"]))

        def finish(self) -> None: ...

    monkeypatch.setattr(f"accelerate.tracking.{kind}Tracker", Fake)
    package = SimpleNamespace(end_run=lambda status: numbers.append((0, status)))
    monkeypatch.setitem(sys.modules, kind.lower(), package)  # type: ignore[arg-type]
    for step in (0, 4):
        run, callback = make_run(step=step), getattr(trackers, kind)(1)
        callback.on_start(run)
        advance(callback, run, measured())
        callback.on_end(run, None)
    assert [each for each in numbers if each[0]] == [(1, 2.0), (5, 2.0)]
    assert [project for project, _ in made] == ["halftune", "halftune"]
    assert made[0][1]["stored"]
    assert made[1][1] == CONTINUED[kind]


def test_tree_of_a_line_has_speeds_and_no_bookkeeping() -> None:
    line = {"step": 3, "loss": None, "tokens": 10, "tokens_real": 8, "tokens_trained": 4, "seconds": 2.0, "time": 1.0}
    assert tree({**line, "loss_scale": 2.0}) == {
        "speed/tokens": 5.0,
        "speed/tokens_real": 4.0,
        "speed/tokens_trained": 2.0,
        "train/loss_scale": 2.0,
    }
