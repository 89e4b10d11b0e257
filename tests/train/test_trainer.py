"""The loop: one loss whatever the split of the batch, exact resume, honest folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halftune.core.errors import ConfigError
from halftune.train.callbacks.base import Run, StepMetrics
from halftune.train.callbacks.metrics import MetricsFile
from halftune.train.checkpoint import checkpoints
from halftune.train.trainer import Interrupted, train


def _close(a: list[float], b: list[float], bound: float) -> None:
    assert len(a) == len(b) > 0
    assert max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)) < bound


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_loss_falls_and_the_folder_is_complete(recipe, losses, adapter: str) -> None:
    loaded, plan = recipe(f"adapter.type={adapter}" if adapter == "lora" else "adapter=none", "training.max_steps=20")
    folder = train(loaded, plan).folder
    curve = losses(folder)
    assert sum(curve[-4:]) < 0.9 * sum(curve[:4])
    for name in ("config.yaml", "resolved.yaml", "plan.json", "environment.json", "data_report.json", "dtypes.json"):
        assert (folder / name).stat().st_size > 0, name
    for name in ("metrics.jsonl", "loss.png", "report.html", "finished.json"):
        assert (folder / name).stat().st_size > 0, name
    weights = "adapter_model.safetensors" if adapter == "lora" else "model.safetensors"
    assert (folder / "final" / weights).exists()


def test_splitting_the_global_batch_changes_nothing_but_rounding(recipe, losses, tmp_path: Path) -> None:
    curves = []
    for size, accumulation in ((8, 1), (4, 2), (2, 4)):
        loaded, plan = recipe(
            f"training.per_device_train_batch_size={size}",
            f"training.gradient_accumulation_steps={accumulation}",
            f"training.output_dir={tmp_path}/{size}",
        )
        curves.append(losses(train(loaded, plan).folder))
    _close(curves[1], curves[0], 1e-5)
    _close(curves[2], curves[0], 1e-5)


def test_packed_and_padded_rows_give_the_same_first_loss(recipe, losses, tmp_path: Path) -> None:
    """One step over the whole set: the loss is the mean over all trained tokens, however they are laid out."""
    curves = []
    for packing in ("true", "false"):
        loaded, plan = recipe(
            f"data.packing={packing}",
            "training.per_device_train_batch_size=96",
            "training.max_steps=1",
            f"training.output_dir={tmp_path}/{packing}",
        )
        curves.append(losses(train(loaded, plan).folder))
    _close(curves[0], curves[1], 1e-5)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_an_interrupted_run_goes_on_bit_identically(recipe, losses, tmp_path: Path, monkeypatch, packing: str) -> None:
    settings = ("adapter.dropout=0.1", f"data.packing={packing}", "training.gradient_accumulation_steps=2")
    settings += ("training.per_device_train_batch_size=4", "training.max_steps=20")
    loaded, plan = recipe(*settings, f"training.output_dir={tmp_path}/whole")
    whole = train(loaded, plan).folder

    loaded, plan = recipe(*settings, f"training.output_dir={tmp_path}/parts")
    on_step = MetricsFile.on_step

    def interrupt(self: MetricsFile, run: Run, metrics: StepMetrics) -> None:
        on_step(self, run, metrics)
        if run.step == 7:  # a signal that arrives in the middle of an epoch
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsFile, "on_step", interrupt)
    with pytest.raises(Interrupted) as caught:
        train(loaded, plan)
    assert caught.value.exit_code == 143
    assert [path.name for path in checkpoints(tmp_path / "parts")] == ["checkpoint-7"]
    monkeypatch.undo()
    parts = train(loaded, plan).folder
    assert losses(parts) == losses(whole)
    a, b = (load_file(folder / "final" / "adapter_model.safetensors") for folder in (whole, parts))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_finished_run_is_left_alone(recipe) -> None:
    loaded, plan = recipe("training.max_steps=2")
    folder = train(loaded, plan).folder
    before = (folder / "metrics.jsonl").read_text()
    assert "finished already" in train(loaded, plan).message
    assert (folder / "metrics.jsonl").read_text() == before


def test_another_configuration_does_not_train_over_a_run(recipe) -> None:
    loaded, plan = recipe("training.max_steps=2")
    train(loaded, plan)
    loaded, plan = recipe("training.max_steps=2", "training.learning_rate=5e-4")
    with pytest.raises(ConfigError, match=r"training\.learning_rate was 0\.001, now 0\.0005"):
        train(loaded, plan)


def test_resume_never_refuses_a_used_folder(recipe) -> None:
    loaded, plan = recipe("training.max_steps=2")
    train(loaded, plan)
    loaded, plan = recipe("training.max_steps=2", "training.resume=never")
    with pytest.raises(ConfigError, match="resume is 'never'"):
        train(loaded, plan)


def test_more_epochs_go_on_from_the_end(recipe, losses) -> None:
    loaded, plan = recipe("training.max_steps=3", "training.save_steps=3")
    train(loaded, plan)
    loaded, plan = recipe("training.max_steps=5", "training.save_steps=3")
    folder = train(loaded, plan).folder
    assert len(losses(folder)) == 5
    assert json.loads((folder / "finished.json").read_text())["step"] == 5


def test_the_best_evaluation_is_saved_when_asked(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, plan = recipe(
        "data.eval_split=16",
        "training.eval_steps=2",
        "training.load_best=true",
        "training.save_steps=2",
        "training.save_total_limit=1",
        "training.max_steps=6",
    )
    measured = iter((0.7, 0.5, 0.6))
    monkeypatch.setattr("halftune.train.trainer.evaluate", lambda stepper, feed: next(measured))
    folder = train(loaded, plan).folder
    evaluations = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    best = min((line for line in evaluations if "eval_loss" in line), key=lambda line: line["eval_loss"])
    assert best["step"] == 4
    saved = load_file(folder / "final" / "adapter_model.safetensors")
    kept = load_file(folder / f"checkpoint-{best['step']}" / "trainable.safetensors")
    shorten = {name.replace(".default", ""): value for name, value in kept.items()}
    assert saved
    assert all(torch.equal(value, shorten[name]) for name, value in saved.items())


def test_checkpoints_are_rotated_but_never_the_best(recipe) -> None:
    loaded, plan = recipe("training.max_steps=6", "training.save_steps=1", "training.save_total_limit=2")
    folder = train(loaded, plan).folder
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-5", "checkpoint-6"]


@pytest.mark.parametrize("guard", ["cast", "strict"])
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_bf16_run_needs_no_casts_at_attention(recipe, adapter: str, guard: str) -> None:
    loaded, plan = recipe("precision=bf16", f"adapter={adapter}", f"attention.guard={guard}", "training.max_steps=2")
    folder = train(loaded, plan).folder
    report = json.loads((folder / "guard.json").read_text())
    assert report["compute"] == "bf16"
    assert report["casts"] == 0
