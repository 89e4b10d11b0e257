"""Several things at once over several launches: what counts, what is kept and what is asked must survive each end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from patience import exit_code
from safetensors.torch import load_file

from halftune.core.errors import ConfigError, TrainingError
from halftune.data.batch import Batch
from halftune.methods import Reference
from halftune.methods.sft import Sft
from halftune.model.policy.policy import PolicyModel
from halftune.train import trainer
from halftune.train.loop import nonfinite, stepper
from halftune.train.report.page import Report, Status, bring_up_to_date, write_report
from halftune.train.run_folder.checkpoints import checkpoints, newest_valid
from halftune.train.signals.interrupt import Interrupted
from halftune.train.state import TrainState
from halftune.train.trainer import train

UNEQUAL = {"seconds", "eval_seconds", "time", "memory_bytes"}
QUICK = ("training.per_device_train_batch_size=2", "data.max_length=48", "adapter.dropout=0.1")
# evaluation loss after each step: the best is followed by three that are not better
COURSE = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5, 10: 2.5, 12: 2.6, 14: 2.5, 16: 2.9, 18: 1.0}


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Report, "_write", lambda *_: None)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in UNEQUAL} for line in lines]


def same_end(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "final" / "adapter_model.safetensors") for folder in (one, other))
    return metrics(one) == metrics(other) and a.keys() == b.keys() and all(a[n].equal(b[n]) for n in a)


def before_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Does something when ``number - 1`` updates have been made."""
    step = stepper.start_step

    def acting(run: TrainState, batches: Any, **options: Any) -> Any:
        if run.schedule.last_epoch == number - 1:
            action()
        return step(run, batches, **options)

    monkeypatch.setattr(stepper, "start_step", acting)


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def killed_before(number: int, loaded: Any, plan: Any) -> None:
    """A launch, in a process of its own, that kill -9 ends before a step."""
    process = os.fork()
    if process == 0:
        try:
            before_step(pytest.MonkeyPatch(), number, send(signal.SIGKILL))
            train(loaded, plan)
        finally:
            os._exit(99)
    assert exit_code(process) == -signal.SIGKILL


@pytest.mark.slow
def test_best_patience_and_rotation_outlive_kills(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (*QUICK, "training.max_steps=18", "training.save_steps=3", "data.eval_split=4", "training.eval_steps=2")
    settings += ("training.save_total_limit=1", "training.load_best=true", "training.early_stopping_patience=3")
    monkeypatch.setattr(trainer, "evaluate", lambda run, *_: {"eval_loss": COURSE[run.schedule.last_epoch]})
    whole = train(*recipe(*settings, f"training.output_dir={tmp_path}/whole"))
    assert "stopped early: no better eval_loss than 2.5 (step 10) in 3 evaluations" in whole.message
    assert [path.name for path in checkpoints(whole.folder)] == ["checkpoint-10", "checkpoint-16"]
    loaded, folder = recipe(*settings), tmp_path / "run"
    left = {
        8: ["checkpoint-4", "checkpoint-6"],  # the best and the newest, though the limit is one
        15: ["checkpoint-10", "checkpoint-12"],  # of two evaluations without a better one, the second is counted again
    }
    for step, kept in left.items():
        killed_before(step, *loaded)
        assert [path.name for path in checkpoints(folder)] == kept
    assert train(*loaded).message.replace("/run/", "/whole/") == whole.message
    assert same_end(folder, whole.folder)
    result = load_file(folder / "final" / "adapter_model.safetensors")
    best = load_file(folder / "checkpoint-10" / "trainable.safetensors")
    assert any(value.equal(best[name.replace(".weight", ".default.weight")]) for name, value in result.items())


def test_batches_of_tokens_by_length_go_on_in_the_middle_of_an_epoch(recipe, rows_file: Path, tmp_path: Path) -> None:
    """With accumulation and dropout, in the second epoch, whose batches are others."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(rows_file.read_text().splitlines(keepends=True)[:24]))
    settings = ("adapter.dropout=0.1", "data.max_length=48", "training.save_steps=2", f"data.train={few}")
    settings += ("training.max_steps=null", "training.num_train_epochs=2", "training.gradient_accumulation_steps=2")
    settings += (
        "training.per_device_train_batch_size=null",
        "training.tokens_per_batch=96",
        "data.group_by_length=true",
    )
    whole = train(*recipe(*settings, f"training.output_dir={tmp_path}/whole"))
    in_epoch = whole.step // 2
    assert in_epoch >= 5
    loaded = recipe(*settings)
    killed_before(in_epoch + 4, *loaded)
    newest = newest_valid(tmp_path / "run")
    assert newest is not None
    assert 1 < json.loads((newest / "state.json").read_text())["epoch"] < 2
    assert train(*loaded).step == whole.step
    assert same_end(tmp_path / "run", whole.folder)


def test_skipped_updates_are_counted_over_a_resume(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "MAX_SKIPPED", 5)
    forward, step, taken = Sft.loss, stepper.start_step, iter(range(99))

    def poisoned(self: Sft, policy: PolicyModel, batch: Batch, reference: Reference) -> Any:
        loss = forward(self, policy, batch, reference)
        return replace(loss, total=loss.total * float("nan"))

    def acting(run: TrainState, batches: Any, **options: Any) -> Any:
        if next(taken) == 2:
            send(signal.SIGTERM)()
        return step(run, batches, **options)

    monkeypatch.setattr(Sft, "loss", poisoned)
    monkeypatch.setattr(stepper, "start_step", acting)
    loaded = recipe(*QUICK, "training.on_non_finite=skip", "training.max_steps=9")
    with pytest.raises(Interrupted, match="after step 3"):
        train(*loaded)
    with pytest.raises(TrainingError, match="the last 5 updates were skipped"):
        train(*loaded)
    assert next(taken) == 5


SHORT = (*QUICK, "training.save_steps=2", "training.max_steps=6", "training.save_total_limit=9")


@pytest.fixture
def done(recipe, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, made: dict[str, Path]) -> Path:
    """A copy of the finished run of SHORT."""
    if "run" not in made:
        made["run"] = train(*recipe(*SHORT, f"training.output_dir={tmp_path_factory.mktemp('done') / 'run'}")).folder
    shutil.copytree(made["run"], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    """A run that several tests look at."""
    return {}


@pytest.fixture
def without(recipe) -> Callable[..., tuple[Any, Any]]:
    """``without("max_steps", "training.max_steps=9")``: SHORT with something else in a key's place."""
    return lambda name, *instead: recipe(*(item for item in SHORT if name not in item), *instead)


def unfinished(folder: Path) -> None:
    (folder / "finished.json").unlink()
    shutil.rmtree(folder / "final")


def test_the_same_command_with_a_named_checkpoint_does_not_begin_there_again(
    recipe, done: Path, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    unfinished(done)
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    loaded = recipe(*SHORT[:-1], "training.save_total_limit=1", "training.resume=run/checkpoint-2")
    with monkeypatch.context() as patch:
        before_step(patch, 5, send(signal.SIGTERM))
        with pytest.raises(Interrupted, match="after step 5"):
            train(*loaded)
    # the one that is named stays, or the command could not be given again
    assert [path.name for path in checkpoints(done)] == ["checkpoint-2", "checkpoint-5"]
    caplog.clear()
    train(*loaded)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "run was started from run/checkpoint-2; resuming from its checkpoint-5" in said
    assert sorted(path.name for path in (done / "set-aside").iterdir()) == ["checkpoint-4", "checkpoint-6"]
    assert same_end(done, made["run"])


def test_a_run_of_another_length_says_what_becomes_of_the_learning_rate(without, done: Path, caplog) -> None:
    with pytest.raises(ConfigError, match="at step 6, but the run has only 4 steps"):
        train(*without("max_steps", "training.max_steps=4"))
    assert (done / "finished.json").exists(), "nothing has changed"
    train(*without("max_steps", "training.max_steps=12"))
    (said,) = (text for record in caplog.records if "number of steps changed" in (text := record.getMessage()))
    rate = metrics(done)[-6]["learning_rate"]
    assert f"changed from 6 to 12; the learning rate continues at {rate:.3g} (was " in said
    assert rate > metrics(done)[5]["learning_rate"], "the cosine had come to its end"


def test_a_finished_run_goes_on_where_something_is_left_to_do(
    recipe, without, done: Path, made: dict[str, Path]
) -> None:
    before = (done / "metrics.jsonl").read_bytes()
    assert "already complete" in train(*recipe(*SHORT, "training.logging_steps=7")).message
    assert (done / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(done / "final")
    assert "trained 6 steps" in train(*recipe(*SHORT)).message
    assert same_end(done, made["run"])
    in_epochs = without("max_steps", "training.max_steps=null", "training.num_train_epochs=0.125")
    assert "trained 6 steps" in train(*in_epochs).message
    shutil.rmtree(done / "final")
    for path in checkpoints(done):
        shutil.rmtree(path)
    with pytest.raises(ConfigError, match=r"final is missing.*no checkpoint"):
        train(*in_epochs)


def test_another_configuration_does_not_train_over_a_run(recipe, done: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.learning_rate was 0\.001, now 0\.0005"):
        train(*recipe(*SHORT, "training.learning_rate=5e-4"))


def test_a_finished_run_is_not_written_over_from_an_earlier_checkpoint(recipe, done: Path, tmp_path: Path) -> None:
    named = f"training.resume={done}/checkpoint-2"
    with pytest.raises(
        ConfigError, match=r"is finished, and resume names .*checkpoint-2: its result would be overwritten"
    ):
        train(*recipe(*SHORT, named))
    assert "trained 6 steps" in train(*recipe(*SHORT, named, f"training.output_dir={tmp_path}/other")).message


def test_a_start_that_is_refused_is_no_part_of_the_run(without, done: Path) -> None:
    before = {path: path.read_bytes() for path in done.rglob("*") if path.is_file() and path.name != ".lock"}
    for change in ("learning_rate=5e-4", "max_steps=4"):  # before and after the data has been prepared
        with pytest.raises(ConfigError):
            train(*without(change.partition("=")[0], f"training.{change}"))
    assert {path: path.read_bytes() for path in before} == before


def test_checkpoints_that_are_all_damaged_end_the_run(recipe, done: Path) -> None:
    unfinished(done)
    for path in checkpoints(done):
        weights = path / "optimizer.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(TrainingError, match=r"all checkpoints are damaged.*optimizer\.safetensors has 1,000 bytes"):
        train(*recipe(*SHORT))


def test_a_finished_run_is_told_without_torch(recipe, done: Path, tmp_path: Path) -> None:
    recipe(*SHORT)
    code = "import sys; sys.argv[0] = 'train'\nfrom halftune.cli import train_main\ntry:\n    train_main()\n"
    code += "finally:\n    print('torch' in sys.modules, 'transformers' in sys.modules)"
    command = [sys.executable, "-c", code, "--config", str(tmp_path / "recipe.yaml"), *SHORT]
    (done / "report.html").unlink(missing_ok=True)
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "is already complete (6 steps)" in found
    assert found.endswith("False False\n")
    # killed after its result and before its report: the report is made up for
    assert "finished" in (done / "report.html").read_text()


def test_a_report_that_is_up_to_date_is_left_alone(done: Path) -> None:
    bring_up_to_date(done)
    written = (done / "report.html").stat().st_mtime_ns
    bring_up_to_date(done)
    assert (done / "report.html").stat().st_mtime_ns == written
    # an error after finished.json leaves a younger report that says otherwise; so does the report of a shorter run
    for status, step in ((Status("stopped", "EIO"), 6), (Status("finished"), 5)):
        facts = (done / "finished.json").read_text()
        (done / "finished.json").write_text(json.dumps(json.loads(facts) | {"step": step}))
        write_report(done, status)
        (done / "finished.json").write_text(facts)
        os.utime(done / "finished.json", (1, 1))
        before = (done / "report.html").read_bytes()
        bring_up_to_date(done)
        assert (done / "report.html").read_bytes() != before
        assert "<b>finished</b>" in (done / "report.html").read_text()


def test_a_signal_during_the_last_report_waits_for_it(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def slow(*_: Any) -> None:
        send(signal.SIGTERM)()
        ended.append("written")

    monkeypatch.setattr(Report, "on_end", slow)
    assert train(*recipe(*QUICK, "training.max_steps=1")).step == 1
    assert ended == ["written"]


def test_a_signal_that_a_library_turns_into_something_else_is_still_one(recipe, monkeypatch) -> None:
    def clumsy(*_: Any) -> Any:
        try:
            send(signal.SIGTERM)()
        except KeyboardInterrupt:
            raise ImportError("cannot import name 'x' from partially initialised module") from None

    monkeypatch.setattr("halftune.train.trainer.build", clumsy)
    with pytest.raises(Interrupted, match="stopped by SIGTERM before the first step"):
        train(*recipe(*QUICK))
