"""Steps whose numbers are read while the next one runs: the same weights, curves and errors as when each is awaited."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from process_group import in_processes
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from halftune.config.sections.method import DistillMethod
from halftune.core.errors import TrainingError
from halftune.methods.sft import Sft
from halftune.train import setup
from halftune.train.loop import stepper
from halftune.train.parallel.processes import Readout
from halftune.train.report.page import Report
from halftune.train.signals.interrupt import Interrupted
from halftune.train.state import TrainState
from halftune.train.trainer import train

UNEQUAL = {"seconds", "eval_seconds", "time", "memory_bytes"}
QUICK = ("training.per_device_train_batch_size=2", "data.max_length=48", "training.warmup_steps=2")
Run = Callable[..., Path]


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Report, "_write", lambda *_: None)


@pytest.fixture
def run(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run(late, *overrides)`` → the folder of a run."""

    def go(late: bool, *overrides: str, name: str = "") -> Path:
        monkeypatch.setattr(setup, "runs_late", lambda _: late)
        folder = tmp_path / (name or f"late-{late}")
        return train(*recipe(*QUICK, f"training.output_dir={folder}", *overrides)).folder

    return go


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in UNEQUAL} for line in lines]


def same(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "final" / "adapter_model.safetensors") for folder in (one, other))
    return metrics(one) == metrics(other) and a.keys() == b.keys() and all(a[n].equal(b[n]) for n in a)


def poison(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Losses of these batches are not finite, whenever they are computed."""
    seen = list[tuple[int, ...]]()

    def with_poison(forward: Any) -> Any:
        def poisoned(self: Sft, policy: Any, batch: Any, reference: Any) -> Any:
            if batch.examples not in seen:
                seen.append(batch.examples)
            loss = forward(self, policy, batch, reference)
            return replace(loss, total=loss.total * float("nan")) if seen.index(batch.examples) in numbers else loss

        return poisoned

    monkeypatch.setattr(Sft, "loss", with_poison(Sft.loss))
    monkeypatch.setattr(Sft, "evaluate", with_poison(Sft.evaluate))


def test_late_steps_are_the_same_steps(run: Run) -> None:
    settings = ("training.max_steps=7", "training.gradient_accumulation_steps=2", "adapter.dropout=0.1")
    settings += ("data.eval_split=4", "training.eval_steps=3", "training.save_steps=4", "training.logging_steps=2")
    one, other = run(False, *settings), run(True, *settings)
    assert same(one, other)
    assert len(metrics(other)) > 4


@pytest.mark.parametrize("numbers", [(0,), (3,), (3, 4), (6,)])
def test_a_step_that_is_skipped_leaves_nothing_behind(
    run: Run, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]
) -> None:
    settings = ("training.max_steps=7", "training.on_non_finite=skip", "training.save_steps=5")
    folders = []
    for late in (False, True):
        with monkeypatch.context() as patch:
            poison(patch, *numbers)
            folders.append(run(late, *settings))
    assert same(*folders)
    skipped = [line["step"] for line in metrics(folders[1]) if line.get("skipped")]
    assert skipped == [number + 1 for number in numbers]


def test_a_run_that_stops_names_the_step_and_keeps_the_weights_before_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, wheres = [], []
    end = Report.on_end

    def on_end(self: Report, state: Any, error: BaseException | None) -> None:
        trained = state.model.named_parameters()
        states.append({name: one.detach().clone() for name, one in trained if one.requires_grad})
        end(self, state, error)

    monkeypatch.setattr(Report, "on_end", on_end)
    for late in (False, True):
        with monkeypatch.context() as patch:
            poison(patch, 3)
            with pytest.raises(TrainingError) as caught:
                run(late, "training.max_steps=7")
        assert caught.value.code == "train.non_finite"
        wheres.append(caught.value.what)
    assert wheres[0] == wheres[1]
    assert "in step 4" in wheres[0]
    assert all(states[0][name].equal(states[1][name]) for name in states[0])


def run_out(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The pass of this number runs out of memory."""
    forward, passes = Sft.loss, iter(range(99))

    def limited(self: Sft, policy: Any, batch: Any, reference: Any) -> Any:
        if next(passes) == at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, policy, batch, reference)

    monkeypatch.setattr(Sft, "loss", limited)


@pytest.mark.parametrize("again", ["first_step", "always"])
def test_memory_that_runs_out_where_a_step_is_started_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    settings = ("training.max_steps=5", "training.on_non_finite=skip", f"training.on_out_of_memory={again}")
    poison(monkeypatch, 2)
    run_out(monkeypatch, 5)  # 0 … 3: late steps, 4: where the third is no number, 5: the fourth again
    if again == "always":
        lines = metrics(run(True, *settings))
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
        assert [line["step"] for line in lines if line.get("skipped")] == [3]
        return
    with pytest.raises(TrainingError) as error:
        run(True, *settings)
    assert error.value.code == "train.out_of_memory"
    assert "in step 4 " in error.value.what


@pytest.mark.parametrize("late", [False, True])
def test_memory_that_runs_out_in_an_update_names_its_step(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, late: bool
) -> None:
    update, taken = torch.optim.AdamW.step, iter(range(9))

    def limited(self: Any, *args: Any) -> Any:
        if next(taken) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return update(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", limited)
    with pytest.raises(TrainingError) as error:
        run(late, "training.max_steps=5", "training.on_out_of_memory=always")
    assert error.value.code == "train.out_of_memory"
    assert "in step 3 " in error.value.what
    assert [line["step"] for line in metrics(tmp_path / f"late-{late}")] == [1, 2]  # the one before is read


def test_memory_that_runs_out_in_the_search_for_a_number_hides_no_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 2)
    run_out(monkeypatch, 4)
    with pytest.raises(TrainingError) as error:
        run(True, "training.max_steps=5")
    assert error.value.code == "train.non_finite"
    assert "in step 3" in error.value.what


def test_a_late_run_goes_on_where_it_was_stopped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(True, "training.max_steps=6", name="whole")
    start, taken = stepper.start_step, iter(range(9))

    def acting(*args: Any, **options: Any) -> Any:
        if next(taken) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return start(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(stepper, "start_step", acting)
        with pytest.raises(Interrupted, match="after step 4"):
            run(True, "training.max_steps=6", name="parts")
    assert same(whole, run(True, "training.max_steps=6", name="parts"))


class Waits(TorchDispatchMode):
    """Counts what needs a value from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = str(func) in {f"aten.{name}.default" for name in ("_local_scalar_dense", "nonzero", "equal")}
        files = [frame.filename for frame in traceback.extract_stack(limit=9)] if asked else []
        if asked and not any(name.endswith("linear_cross_entropy/cpu.py") for name in files):  # it asks on CPUs only
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_late_step_waits_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, read, start = Waits(), Readout.read, stepper.start_step
    counts: list[tuple[int, int]] = []
    reads: list[int] = []

    def counted(self: Readout) -> list[float]:
        reads.append(1)
        return read(self)

    def watched(*args: Any, **options: Any) -> Any:
        before = len(waits.found), len(reads)
        with waits:
            started = start(*args, **options)
        counts.append((len(waits.found) - before[0], len(reads) - before[1]))
        return started

    monkeypatch.setattr(Readout, "read", counted)
    monkeypatch.setattr(stepper, "start_step", watched)
    run(True, "training.max_steps=5", "data.packing=true")
    assert len(reads) == 5
    assert counts[1:] == [(0, 0)] * 4, waits.found  # the first step checks the model's head


@pytest.mark.parametrize(("share", "late"), [(0.0, True), (0.5, False)])
def test_a_step_on_the_models_own_answers_is_awaited(share: float, late: bool) -> None:
    method = DistillMethod.model_validate(
        {"type": "distill", "teacher": {"name_or_path": "builtin:tiny"}, "on_policy": share}
    )
    run = SimpleNamespace(
        config=SimpleNamespace(method=method),
        plan=SimpleNamespace(parallel=None),
        scaler=torch.amp.GradScaler(enabled=False),
        optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True),
        device=torch.device("cuda"),
    )
    assert stepper.runs_late(cast("TrainState", run)) is late


def _train(loaded: Any, plan: Any, _rank: int) -> None:
    train(loaded, plan)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_processes_agree_late(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    settings = (*QUICK, "training.max_steps=4", f"distributed.strategy={strategy}", "adapter=none")
    curves = []
    for late in (False, True):
        monkeypatch.setattr(setup, "runs_late", lambda _, late=late: late)
        folder = tmp_path / f"late-{late}"
        loaded, plan = recipe(*settings, f"training.output_dir={folder}", world_size=2)
        assert in_processes(2, partial(_train, loaded, plan)) == [0, 0]
        curves.append(metrics(folder))
    for one, other in zip(*curves, strict=True):
        assert one["tokens_trained"] == other["tokens_trained"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
