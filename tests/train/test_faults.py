"""What may go wrong in the middle of a run: memory, numbers, loggers, disks. Training goes on where it can."""

from __future__ import annotations

import io
import json
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import because

from halftune.core.errors import ConfigError, TrainingError
from halftune.core.log import configure
from halftune.core.status import read_status
from halftune.data.batch import Batch
from halftune.methods import Loss, Reference
from halftune.methods.sft import Sft
from halftune.model.policy.policy import PolicyModel
from halftune.model.result.save import save_final, trainable_state
from halftune.plan import BatchPlan
from halftune.train.callback import StepMetrics
from halftune.train.callbacks.loss_plot import LossPlot
from halftune.train.callbacks.metrics import MetricsFile
from halftune.train.loop import stepper
from halftune.train.loop.out_of_memory import out_of_memory, smaller
from halftune.train.parallel import saving
from halftune.train.parallel.strategy import Strategy
from halftune.train.report.page import Report
from halftune.train.run_folder.checkpoints import checkpoints, newest_valid
from halftune.train.state import TrainState
from halftune.train.trainer import train

FLASH_EVERYWHERE = 10**15  # bytes that no machine has


def metrics(folder: Path) -> list[dict[str, Any]]:
    unequal = {"seconds", "eval_seconds", "time", "memory_bytes"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in unequal} for line in lines]


def final(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "adapter_model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``narrow(4)``: a forward pass of more than 4 rows asks torch's own allocator for more than there is."""

    def make(rows: int, *, from_step: int = 0, training: bool = True) -> None:
        name = "loss" if training else "evaluate"
        forward, steps = getattr(Sft, name), iter(range(10**6))
        step = stepper.start_step
        count = {"now": 0}

        def counted(run: TrainState, batches: Any, **options: Any) -> Any:
            count["now"] = next(steps)
            return step(run, batches, **options)

        def limited(self: Sft, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
            loss = forward(self, policy, batch, reference)  # dropout has drawn by the time that memory runs out
            if len(batch.inputs["input_ids"]) > rows and count["now"] >= from_step:
                torch.empty(FLASH_EVERYWHERE, dtype=torch.uint8)
            return loss

        monkeypatch.setattr(stepper, "start_step", counted)
        monkeypatch.setattr(Sft, name, limited)

    return make


def test_memory_of_torch_python_and_devices_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(FLASH_EVERYWHERE, dtype=torch.uint8)
    assert out_of_memory(caught.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("size mismatch"))


@pytest.mark.parametrize(
    ("before", "after"), [((8, 1), (4, 2)), ((6, 2), (3, 4)), ((3, 1), (1, 3)), ((5, 2), (2, 5)), ((1, 4), None)]
)
def test_the_global_batch_stays(before: tuple[int, int], after: tuple[int, int] | None) -> None:
    batch = BatchPlan(before[0], before[1], 1, 8, because(False), because(False))
    halved = smaller(batch)
    assert (None if halved is None else (halved.micro_batch, halved.accumulation)) == after


def test_the_first_step_is_taken_again_in_smaller_parts(recipe, narrow, tmp_path: Path, caplog) -> None:
    settings = ("adapter.dropout=0.1", "training.max_steps=3")
    split = ("training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=4")
    expected = train(*recipe(*settings, *split, f"training.output_dir={tmp_path}/split")).folder
    narrow(2)
    folder = train(*recipe(*settings)).folder
    # the same dropout, too: nothing of the attempts that failed is left
    assert same(final(folder), final(expected))
    assert metrics(folder) == metrics(expected)
    said = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert len(said) == 2
    assert "in step 1 with a micro-batch of 4 rows: now 2 rows, and 4 passes a step instead of 2" in said[1]


def test_a_run_that_had_to_split_goes_on_split(recipe, narrow, tmp_path: Path) -> None:
    settings = ("adapter.dropout=0.1", "training.save_steps=2", "training.max_steps=4")
    narrow(4)
    whole = train(*recipe(*settings, f"training.output_dir={tmp_path}/whole")).folder
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert json.loads((checkpoint / "state.json").read_text())["micro_batch"] == [8, 4]
    again = train(*recipe(*settings, f"training.resume={checkpoint}", f"training.output_dir={tmp_path}/again")).folder
    assert same(final(again), final(whole))


def test_later_steps_end_with_the_remedy_unless_asked(recipe, narrow, tmp_path: Path) -> None:
    narrow(4, from_step=2)
    settings = ("training.save_steps=2", "training.max_steps=4")
    with pytest.raises(TrainingError) as caught:
        train(*recipe(*settings))
    words = str(caught.value)
    assert "out of memory in step 3 with 8 rows a forward pass" in words
    assert "per_device_train_batch_size: 4 with gradient_accumulation_steps: 2 (the same global batch)" in words
    assert "checkpoint-2 is intact" in words
    narrow(4, from_step=2)
    folder = train(*recipe(*settings, "training.on_out_of_memory=always", f"training.output_dir={tmp_path}/b")).folder
    assert len(metrics(folder)) == 4


def test_one_row_that_does_not_fit_says_what_helps(recipe, narrow) -> None:
    narrow(0)
    with pytest.raises(TrainingError) as caught:
        train(*recipe("training.per_device_train_batch_size=2", "adapter=none"))
    words = str(caught.value)
    assert "in step 1 with one row a forward pass, the minimum" in words
    for what in ("gradient_checkpointing: true", "max_length (now 96)", "adapter: lora", "bf16", "no checkpoint"):
        assert what in words
    assert "batch_size" not in words, "a smaller batch would not help"
    with pytest.raises(TrainingError) as caught:  # what is set already is not advised again
        train(*recipe("training.per_device_train_batch_size=1", "training.gradient_checkpointing=true"))
    assert not any(what in str(caught.value) for what in ("gradient_checkpointing", "adapter: lora", "batch_size"))


def test_evaluation_takes_smaller_batches(recipe, narrow, tmp_path: Path) -> None:
    settings = ("data.eval_split=16", "training.eval_steps=2", "training.max_steps=2", "adapter.dropout=0.1")
    expected = metrics(train(*recipe(*settings, f"training.output_dir={tmp_path}/a")).folder)
    narrow(4, training=False)
    found = metrics(train(*recipe(*settings)).folder)
    assert found[-1]["eval_loss"] == pytest.approx(expected[-1]["eval_loss"], rel=1e-6)
    assert found[:-1] == expected[:-1]  # and dropout is on again afterwards


def test_one_process_of_a_sharded_evaluation_does_not_begin_it_again(recipe, narrow, monkeypatch) -> None:
    monkeypatch.setattr(Strategy, "sharded", True)
    monkeypatch.setattr(saving, "check_shared", lambda *_: None)
    narrow(4, training=False)
    with pytest.raises(TrainingError, match="per_device_eval_batch_size"):
        train(*recipe("data.eval_split=16", "training.eval_steps=1", "training.max_steps=1"))


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Makes the loss of some steps (the first is 1) NaN."""
    step, forward, now = stepper.start_step, Sft.loss, {"step": 0}

    def counted(run: TrainState, batches: Any, **options: Any) -> Any:
        now["step"] += 1
        return step(run, batches, **options)

    def poisoned(self: Sft, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        loss = forward(self, policy, batch, reference)
        return replace(loss, total=loss.total * float("nan")) if now["step"] in steps else loss

    monkeypatch.setattr(stepper, "start_step", counted)
    monkeypatch.setattr(Sft, "loss", poisoned)


def test_a_step_that_is_not_finite_can_be_skipped(recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    poison(monkeypatch, {3})
    seen: list[dict[str, torch.Tensor]] = []
    on_step = MetricsFile.on_step

    def remember(self: MetricsFile, run: TrainState, numbers: StepMetrics) -> None:
        on_step(self, run, numbers)
        seen.append({name: value.clone() for name, value in trainable_state(run.model).items()})

    monkeypatch.setattr(MetricsFile, "on_step", remember)
    settings = ("training.max_steps=5", "training.on_non_finite=skip", "training.logging_steps=1")
    lines = metrics(train(*recipe(*settings)).folder)
    assert [line["skipped"] for line in lines] == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert lines[2]["loss"] is None
    assert lines[2]["tokens_trained"] == 0
    assert same(seen[1], seen[2])
    assert not same(seen[2], seen[3])


def test_a_skipped_step_weighs_nothing_in_a_longer_line(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {2})
    settings = ("training.max_steps=4", "training.on_non_finite=skip", "training.logging_steps=4")
    (line,) = metrics(train(*recipe(*settings)).folder)
    assert line["skipped"] == 1.0
    assert 1.0 < line["loss"] < 10.0


def test_stopping_keeps_the_last_good_checkpoint(recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    poison(monkeypatch, {4})
    with pytest.raises(TrainingError, match=r"the loss is nan in step 4.*checkpoint-3 is intact"):
        train(*recipe("training.save_steps=1", "training.max_steps=5"))
    assert newest_valid(tmp_path / "run") == tmp_path / "run" / "checkpoint-3"


def test_an_update_that_breaks_a_weight_is_not_saved(recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = stepper.finish_step

    def breaking(run: TrainState, started: Any) -> Any:
        found = step(run, started)
        if run.schedule.last_epoch == 2:
            run.trainable[0].data.view(-1)[0] = float("inf")
        return found

    monkeypatch.setattr(stepper, "finish_step", breaking)
    with pytest.raises(TrainingError, match=r"lora_A.*is not finite after step 2.*checkpoint-1 is intact"):
        train(*recipe("training.save_steps=1", "training.max_steps=5"))
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-1"]


def test_what_only_looks_on_may_fail(recipe, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def odd(*_: Any) -> None:
        raise AttributeError("module 'numpy' has no attribute 'bool8'")

    monkeypatch.setattr(Report, "_write", fail)
    monkeypatch.setattr(LossPlot, "_draw", odd)
    settings = ("data.eval_split=8", "training.eval_steps=1", "training.max_steps=3")
    folder = train(*recipe(*settings)).folder
    assert (folder / "finished.json").exists()
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([words for words in warned if words.startswith("Report failed, training continues")]) == 1
    (summary,) = (words for words in warned if words.startswith("callbacks that failed during training"))
    assert "Report 4 times (OSError: [Errno 28] No space left on device)" in summary
    assert "LossPlot 4 times (AttributeError" in summary


def test_an_end_that_fails_does_not_hide_what_ended_the_run(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the end is broken too")

    poison(monkeypatch, {2})
    monkeypatch.setattr("halftune.train.callbacks.dtype_guard.DtypeGuard.on_end", fail)
    with pytest.raises(TrainingError, match="the loss is nan in step 2"):
        train(*recipe())


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path, self.ballast = path, path / "ballast"

    def fill(self, leave: int = 0) -> None:
        with self.ballast.open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                file.truncate(max(0, file.tell() - leave))

    def free(self) -> None:
        self.ballast.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A tmpfs of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield Disk(path)
    subprocess.run(["umount", "-l", str(path)], check=True)


def at_step(monkeypatch: pytest.MonkeyPatch, actions: dict[int, Callable[[], None]]) -> None:
    """Does something just before a step ends."""
    step, now = stepper.finish_step, {"step": 0}

    def acting(run: TrainState, started: Any) -> Any:
        found = step(run, started)
        now["step"] += 1
        actions.get(now["step"], lambda: None)()
        return found

    monkeypatch.setattr(stepper, "finish_step", acting)


def test_disk_full_at_a_checkpoint(recipe, disk: Disk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd) -> None:
    settings = ("training.save_steps=2", "training.max_steps=5", "adapter.dropout=0.1")
    whole = train(*recipe(*settings, f"training.output_dir={tmp_path}/whole")).folder
    run = disk.path / "run"
    settings += (f"training.output_dir={run}",)
    at_step(monkeypatch, {4: disk.fill})
    with pytest.raises(TrainingError, match=r"checkpoint-4: cannot write.*No space left.*free space and run the same"):
        train(*recipe(*settings))
    assert newest_valid(run) == run / "checkpoint-2"
    assert not list(run.glob(".*.writing"))
    status = read_status(run / "status.json")
    assert status is not None
    assert status.state == "failed"
    assert "No space left" in status.error
    assert "Traceback" not in capfd.readouterr().err
    disk.free()
    train(*recipe(*settings))
    assert same(final(run), final(whole))
    assert metrics(run) == metrics(whole)


def test_disk_full_between_checkpoints_loses_no_line(recipe, disk: Disk, monkeypatch, tmp_path: Path, capfd) -> None:
    at_step(monkeypatch, {2: disk.fill, 4: disk.free})
    folder = train(*recipe("training.max_steps=6", f"training.output_dir={disk.path / 'run'}")).folder
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5, 6]
    assert "Logging error" not in capfd.readouterr().err


@pytest.mark.parametrize("leave", [0, 100_000])
def test_disk_full_at_the_final_save(recipe, disk: Disk, monkeypatch, tmp_path: Path, leave: int) -> None:
    """With nothing left, and with room for the adapter but not for its tokenizer."""
    settings = ("training.max_steps=4", "training.save_steps=3", "data.eval_split=8", "training.eval_steps=4")
    settings += (f"training.output_dir={disk.path / 'run'}",)

    def fill_and_save(*arguments: Any) -> None:
        disk.fill(leave)
        save_final(*arguments)

    monkeypatch.setattr("halftune.train.trainer.save_final", fill_and_save)
    with pytest.raises(
        TrainingError, match=r"final: cannot write the result.*No space left.*free space and run the same"
    ):
        train(*recipe(*settings))
    run = disk.path / "run"
    assert not (run / "final").exists()
    assert not list(run.glob(".*.writing"))
    assert newest_valid(run) == run / "checkpoint-4"
    monkeypatch.undo()
    disk.free()
    assert "trained 4 steps" in train(*recipe(*settings)).message
    assert final(run)


def test_a_disk_that_vanishes_is_said(recipe, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an unmounted disk there is a folder, too, and nobody wants his checkpoint there."""
    hidden = disk.path.with_name("hidden")
    hidden.mkdir()

    def vanish() -> None:
        subprocess.run(["mount", "--bind", str(hidden), str(disk.path)], check=True)
        (disk.path / "run").mkdir()

    at_step(monkeypatch, {3: vanish})
    with pytest.raises(TrainingError, match=r"run folder has vanished.*put it back and run the same command again"):
        train(*recipe("training.save_steps=2", f"training.output_dir={disk.path / 'run'}"))
    subprocess.run(["umount", "-l", str(disk.path)], check=True)
    assert newest_valid(disk.path / "run") == disk.path / "run" / "checkpoint-2"


@pytest.mark.parametrize("what", ["moved", "deleted"])
def test_a_folder_that_is_gone_ends_the_run_at_the_next_save(recipe, tmp_path: Path, monkeypatch, what: str) -> None:
    moved, run = tmp_path / "elsewhere", tmp_path / "run"
    gone = {"moved": lambda: run.rename(moved) and None, "deleted": lambda: shutil.rmtree(run)}[what]
    settings = ("training.max_steps=5", "training.save_steps=2", "training.per_device_train_batch_size=2")
    at_step(monkeypatch, {3: gone})
    with pytest.raises(TrainingError) as caught:
        train(*recipe(*settings))
    assert caught.value.code == "train.folder_vanished"
    assert not list(run.glob("checkpoint-*"))
    if what == "moved":  # back to where it was: nothing up to the last checkpoint is lost
        shutil.rmtree(run, ignore_errors=True)
        moved.rename(run)
    monkeypatch.undo()
    expected = [1, 2, 3, 4, 5]
    assert [line["step"] for line in metrics(train(*recipe(*settings)).folder)] == expected


def test_a_folder_that_becomes_read_only_is_said(recipe, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk.path)], check=True)

    settings = ("training.save_steps=2", "training.max_steps=5", "training.per_device_train_batch_size=2")
    run = disk.path / "run"
    # no file may be open for writing: the lock's and the log's are
    monkeypatch.setattr("halftune.train.trainer.log_to", lambda *_, **__: nullcontext())
    monkeypatch.setattr("halftune.train.trainer.locked", lambda path: path.mkdir() or nullcontext())
    at_step(monkeypatch, {3: lambda: remount("ro")})
    with pytest.raises(TrainingError, match=r"checkpoint-4: cannot write.*Read-only.*make the folder writable and run"):
        train(*recipe(*settings, f"training.output_dir={run}"))
    remount("rw")
    assert newest_valid(run) == run / "checkpoint-2"


def test_a_read_only_folder_is_refused_at_once(recipe, disk: Disk) -> None:
    loaded, plan = recipe(f"training.output_dir={disk.path / 'run'}")
    subprocess.run(["mount", "-o", "remount,ro", str(disk.path)], check=True)
    with pytest.raises(TrainingError, match=r"cannot write the run folder: Read-only file system.*choose another"):
        train(loaded, plan)
    with pytest.raises(ConfigError, match=r"training\.output_dir: .* read-only file system"):  # the check before torch
        recipe(f"training.output_dir={disk.path / 'run'}")


def test_the_log_of_a_run_holds_evaluations_and_the_end(recipe, tmp_path: Path, monkeypatch, capsys) -> None:
    """Also where a terminal shows them otherwise, or nothing is shown."""
    settings = ("training.max_steps=2", "data.eval_split=8", "training.eval_steps=1", "training.save_steps=1")
    root = logging.getLogger("halftune")
    before, shown = (list(root.handlers), root.propagate), io.StringIO()
    root.handlers.clear()
    monkeypatch.setattr("sys.stderr", shown)
    try:
        configure()
        train(*recipe(*settings))
        poison(monkeypatch, {1})
        with pytest.raises(TrainingError):
            train(*recipe(*settings, f"training.output_dir={tmp_path}/b"))
    finally:
        root.handlers[:], root.propagate = before
    text = (tmp_path / "run" / "train.log").read_text()
    assert text.count("eval loss") == 2
    assert "step 2/2 · loss" in text
    assert "trained 2 steps; the result is in" in text
    assert "the loss is nan in step 1" in (tmp_path / "b" / "train.log").read_text()
    assert not [words for words in ("eval loss", "trained", "is nan") if words in shown.getvalue()]
