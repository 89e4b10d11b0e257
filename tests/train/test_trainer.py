"""The loop: one loss whatever the split of the batch, exact resume, honest folders."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from halftune.core.errors import ConfigError, TrainingError
from halftune.methods import Loss
from halftune.model.policy.policy import PolicyModel
from halftune.model.result.save import trainable_state
from halftune.train.callback import StepMetrics
from halftune.train.callbacks.metrics import MetricsFile
from halftune.train.loop.evaluate import evaluate
from halftune.train.loop.step import finish_step, start_step
from halftune.train.run_folder.checkpoints import checkpoints
from halftune.train.run_folder.lock import locked
from halftune.train.run_folder.start_or_resume import RunFolder
from halftune.train.schedule import steps_between
from halftune.train.setup import build
from halftune.train.signals.interrupt import Interrupted
from halftune.train.state import TrainState
from halftune.train.trainer import train


def _close(a: list[float], b: list[float], bound: float) -> None:
    assert len(a) == len(b) > 0
    assert max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)) < bound


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_loss_falls_and_the_folder_is_complete(recipe, losses, adapter: str) -> None:
    section = "adapter.type=lora" if adapter == "lora" else "adapter=none"
    loaded, plan = recipe(section, "training.max_steps=20", "training.learning_rate=1e-2")
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
            "training.max_steps=5",
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
    # an epoch has 12 steps, fewer when packed: the run passes the end of one
    settings += ("training.per_device_train_batch_size=4", "training.max_steps=14", "data.max_length=64")
    loaded, plan = recipe(*settings, f"training.output_dir={tmp_path}/whole")
    whole = train(loaded, plan).folder

    loaded, plan = recipe(*settings, f"training.output_dir={tmp_path}/parts")
    on_step = MetricsFile.on_step

    def interrupt(self: MetricsFile, run: TrainState, metrics: StepMetrics) -> None:
        on_step(self, run, metrics)
        if run.step == 7:  # a signal that arrives in the middle of an epoch
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
    monkeypatch.setattr("halftune.train.trainer.evaluate", lambda *_: {"eval_loss": next(measured)})
    folder = train(loaded, plan).folder
    evaluations = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    best = min((line for line in evaluations if "eval_loss" in line), key=lambda line: line["eval_loss"])
    assert best["step"] == 4
    saved = load_file(folder / "final" / "adapter_model.safetensors")
    kept = load_file(folder / f"checkpoint-{best['step']}" / "trainable.safetensors")
    shorten = {name.replace(".default", ""): value for name, value in kept.items()}
    assert saved
    assert all(torch.equal(value, shorten[name]) for name, value in saved.items())


def test_periods_that_are_a_share_of_all_steps(recipe, losses, tmp_path: Path, monkeypatch) -> None:
    """At the steps at which transformers evaluates and saves: every ceil(share × steps), after a resume too."""
    assert [steps_between(every, 7) for every in (3, 0.25, 1 / 7, 0.01)] == [3, 2, 1, 1]
    periods = ("data.eval_split=4", "training.eval_steps=0.25", "training.save_steps=0.3", "training.max_steps=7")
    folder = train(*recipe(*periods, "training.save_total_limit=9")).folder
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 6, 7]
    first = f"training.resume={folder / 'checkpoint-3'}"
    again = train(*recipe(*periods, first, f"training.output_dir={tmp_path / 'again'}")).folder
    assert [path.name for path in checkpoints(again)] == ["checkpoint-6", "checkpoint-7"]
    assert losses(again) == losses(folder)[3:]


@pytest.mark.parametrize(("adapter", "guard"), [("lora", "cast"), ("none", "strict")])
def test_a_bf16_run_needs_no_casts_at_attention(recipe, adapter: str, guard: str) -> None:
    loaded, plan = recipe("precision=bf16", f"adapter={adapter}", f"attention.guard={guard}", "training.max_steps=2")
    folder = train(loaded, plan).folder
    report = json.loads((folder / "guard.json").read_text())
    assert report["compute"] == "bf16"
    assert report["casts"] == 0


@pytest.mark.parametrize("packing", ["true", "false"])
def test_evaluation_is_the_mean_over_all_labelled_tokens(recipe, tmp_path: Path, packing: str) -> None:
    loaded, plan = recipe("data.eval_split=20", f"data.packing={packing}", "training.per_device_eval_batch_size=7")
    run = build(loaded, plan, RunFolder(tmp_path, None, finished=False))
    model, split = run.model.train(), run.data.eval
    measured = evaluate(run)
    assert model.training
    total = count = 0.0
    with torch.no_grad():
        for index in range(len(split)):
            sample = split.example(index).segments[0]
            ids, labels = torch.from_numpy(sample.input_ids).long()[None], torch.from_numpy(sample.labels).long()
            logits = model.eval()(input_ids=ids).logits[0, :-1].double()
            total += float(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum"))
            count += int((labels[1:] != -100).sum())
    assert abs(measured["eval_loss"] - total / count) / (total / count) < 1e-6


def _entropy_adaptive(logits: torch.Tensor, nll: torch.Tensor) -> torch.Tensor:
    """LLaMA-Factory's weights (``eaft_loss_func``): the top logits' entropy over 3, to a power."""
    top = logits.detach().topk(5, dim=-1).values
    logs = top - top.logsumexp(-1, keepdim=True)
    return (-(logs.exp() * logs).sum(-1) / 3.0) ** 1.5


WEIGHTED = {
    "dft": ({}, lambda _, nll: (-nll.detach()).exp()),
    "eaft": ({"eaft_tokens": 5, "eaft_alpha": 1.5}, _entropy_adaptive),
}


@pytest.mark.parametrize("loss", WEIGHTED)
def test_losses_that_weight_tokens(recipe, rows_file: Path, tmp_path: Path, loss: str) -> None:
    keys, weights = WEIGHTED[loss]
    method = json.dumps({"type": "sft", "loss": loss, **keys})
    every = (f"data.train={rows_file}", f"training.output_dir={tmp_path}", f"method={method}")
    run = build(*recipe(*every), RunFolder(tmp_path, None, finished=False))
    (batch, *_) = run.feed.micro_batches(run.feed.rows(0)[:4])
    found = run.method.loss(PolicyModel(run.model), batch, run.reference)
    found.total.backward()
    ours = {name: one.grad.clone() for name, one in run.model.named_parameters() if one.grad is not None}
    run.model.zero_grad()
    inputs = {
        name: batch.inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch.inputs
    }
    labels = batch.tokens["labels"][:, 1:].flatten()
    logits = run.model(**inputs).logits[:, :-1].flatten(0, 1)
    nll = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    wanted = (nll * weights(logits, nll)).sum()
    wanted.backward()
    assert float((found.total - wanted).abs().detach()) < 1e-5 * float(wanted.detach())
    for name, one in run.model.named_parameters():
        if name in ours:
            assert float((one.grad - ours[name]).norm()) <= 1e-5 * float(one.grad.norm()) + 1e-8
    with torch.no_grad():
        plain = run.method.evaluate(PolicyModel(run.model), batch, run.reference).total
    assert float((plain - nll.sum()).abs().detach()) < 1e-5 * float(plain)


def test_label_smoothing_is_that_of_torch_in_training_and_evaluation(recipe, rows_file: Path, tmp_path: Path) -> None:
    every = (f"data.eval={rows_file}", "training.per_device_train_batch_size=96")
    run = build(*recipe(*every, "training.label_smoothing=0.2"), RunFolder(tmp_path, None, finished=False))
    (_, (batch,)) = next(run.feed.steps(0, 1))
    with torch.no_grad():
        logits = run.model(**batch.inputs).logits[:, :-1].flatten(0, 1).double()
    wanted = torch.nn.functional.cross_entropy(logits, batch.tokens["labels"][:, 1:].flatten(), label_smoothing=0.2)
    assert evaluate(run)["eval_loss"] == pytest.approx(wanted.item(), rel=1e-6)
    assert finish_step(run, start_step(run, [batch])).loss == pytest.approx(wanted.item(), rel=1e-6)


def test_a_folder_with_other_files_is_not_written_over(recipe, tmp_path: Path) -> None:
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "precious.txt").write_text("mine")
    loaded, plan = recipe()
    with pytest.raises(ConfigError, match="unrelated files"):
        train(loaded, plan)
    assert (tmp_path / "run" / "final" / "precious.txt").read_text() == "mine"


def test_a_folder_in_use_is_refused(recipe, tmp_path: Path) -> None:
    loaded, plan = recipe()
    with locked(tmp_path / "run"), pytest.raises(ConfigError, match="another process"):
        train(loaded, plan)


def test_going_on_with_other_data_is_refused(recipe, rows_file: Path, tmp_path: Path) -> None:
    rows = rows_file.read_text().splitlines(keepends=True)
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(rows))
    settings = (f"data.train={mine}", "training.save_steps=2")
    train(*recipe(*settings, "training.max_steps=2"))
    mine.write_text("".join(reversed(rows)))

    def content() -> dict[str, bytes]:  # but status.json, which tells of the last launch
        files = (path for path in (tmp_path / "run").iterdir() if path.is_file() and path.name != "status.json")
        return {path.name: path.read_bytes() for path in files}

    before = content()
    with pytest.raises(ConfigError, match="changed since the checkpoint"):
        train(*recipe(*settings, "training.max_steps=4"))
    assert content() == before


def test_going_on_with_another_global_batch_is_refused_but_not_with_another_split(recipe, losses) -> None:
    train(*recipe("training.save_steps=2", "training.max_steps=2"))
    more = ("training.save_steps=2", "training.max_steps=4")
    with pytest.raises(ConfigError, match="took 8 rows a step, now 4"):
        train(*recipe(*more, "training.per_device_train_batch_size=4"))
    split = ("training.per_device_train_batch_size=4", "training.gradient_accumulation_steps=2")
    assert len(losses(train(*recipe(*more, *split)).folder)) == 4


def test_a_prolonged_run_follows_the_longer_schedule_at_once(recipe) -> None:
    train(*recipe("training.save_steps=4", "training.max_steps=4"))
    folder = train(*recipe("training.save_steps=4", "training.max_steps=8")).folder
    assert json.loads((folder / "finished.json").read_text())["step"] == 8
    rates = [json.loads(line)["learning_rate"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rates) == 8
    # the fifth of eight steps, one of them warm-up, on a cosine from 1e-3
    assert rates[4] == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * 3 / 7)))


def test_a_full_disk_is_said_and_leaves_earlier_checkpoints(recipe, tmp_path: Path) -> None:
    train(*recipe("training.save_steps=2", "training.max_steps=2"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(TrainingError, match="cannot write the checkpoint of step 4"):
            train(*recipe("training.save_steps=2", "training.max_steps=4"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    assert not list((tmp_path / "run").glob(".checkpoint*"))


def test_overflowing_scaled_gradients_skip_the_update_and_the_schedule(recipe, tmp_path: Path) -> None:
    loaded, plan = recipe()
    run = build(loaded, plan, RunFolder(tmp_path, None, finished=False))
    run.scaler = torch.amp.GradScaler("cpu", init_scale=float(2**127))
    forward = run.method.loss

    def steep(*inputs: Any) -> Loss:
        loss = forward(*inputs)
        return replace(loss, total=loss.total * 1e6)  # gradients that the scale carries over the top

    run.method.loss = steep  # type: ignore[method-assign]
    before = {name: value.clone() for name, value in trainable_state(run.model).items()}
    (_, batches) = next(run.feed.steps(0, 1))
    metrics = finish_step(run, start_step(run, batches))
    assert metrics.extra["skipped"] == 1.0
    assert metrics.extra["loss_scale"] < 2**127
    assert math.isfinite(metrics.loss)
    assert all(torch.equal(value, before[name]) for name, value in trainable_state(run.model).items())
    assert run.schedule.last_epoch == 0
