"""Evaluation sets with names: each is measured by itself, and ``eval_loss`` stays the loss of all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from halftune.train import trainer
from halftune.train.loop.evaluate import evaluate
from halftune.train.run_folder.start_or_resume import RunFolder
from halftune.train.setup import build
from halftune.train.trainer import train


@pytest.fixture
def parts(rows_file: Path, tmp_path: Path) -> Callable[..., str]:
    """``parts(a="code", b=None)`` → ``data.eval`` of one file each, with and without a name."""
    lines = rows_file.read_text().splitlines(keepends=True)

    def write(**names: str | None) -> str:
        entries = []
        for index, (file, name) in enumerate(names.items()):
            path = tmp_path / f"{file}.jsonl"
            path.write_text("".join(lines[index * 7 : index * 15 + 10]))
            entries.append(f"{{path: {path}, weight: {1 + index / 2}" + (f", name: {name}}}" if name else "}"))
        return f"data.eval=[{', '.join(entries)}]"

    return write


def measured(recipe, tmp_path: Path, *settings: str) -> dict[str, float]:
    found = evaluate(build(*recipe(*settings), RunFolder(tmp_path, None, finished=False)))
    assert found is not None
    return found


@pytest.mark.parametrize("packing", ["true", "false"])
def test_each_set_has_the_loss_that_it_has_alone(recipe, parts, tmp_path: Path, packing: str) -> None:
    rest = (f"data.packing={packing}", "training.per_device_eval_batch_size=7")
    whole = measured(recipe, tmp_path, parts(a=None, b=None, c=None), *rest)
    assert list(whole) == ["eval_loss"]
    named = measured(recipe, tmp_path, parts(a="code", b=None, c="chat-2"), *rest)
    assert list(named) == ["eval_loss", "eval_loss_code", "eval_loss_chat-2"]
    assert named["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)
    alone = measured(recipe, tmp_path, parts(a=None), *rest)
    assert named["eval_loss_code"] == pytest.approx(alone["eval_loss"], rel=1e-6)
    assert named["eval_loss_chat-2"] != pytest.approx(alone["eval_loss"], rel=1e-3)


def test_a_precomputed_reference_belongs_to_its_examples(recipe, rows_file: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()[:30]]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no"} for row in rows]
    for name, some in (("train", pairs), ("a", pairs[:6]), ("b", pairs[6:20])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in some))
    sets = ", ".join(f"{{path: {tmp_path}/{name}.jsonl, name: {name}}}" for name in "ba")
    settings = (
        "method={type: dpo, reference: precomputed}",
        f"data.train={tmp_path}/train.jsonl",
        f"data.eval=[{sets}]",
    )
    found = measured(recipe, tmp_path, *settings)
    # an untrained model is its own reference: the loss of every pair is log 2
    assert {name: found[name] for name in ("eval_loss", "eval_loss_a", "eval_loss_b")} == pytest.approx(
        dict.fromkeys(("eval_loss", "eval_loss_a", "eval_loss_b"), 0.6931472), abs=1e-6
    )


def test_a_named_set_chooses_the_best_weights(recipe, parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = (parts(a="code", b="chat"), "training.metric_for_best=eval_loss_code", "training.load_best=true")
    settings = (*sets, "training.eval_steps=2", "training.save_steps=2", "training.save_total_limit=1")
    course = {2: (0.9, 0.7), 4: (0.8, 0.5), 6: (0.7, 0.6), 8: (0.6, 0.65)}

    def course_of(run, *_) -> dict[str, float]:
        mean, code = course[run.step]
        return {"eval_loss": mean, "eval_loss_code": code, "eval_loss_chat": 1.0}

    monkeypatch.setattr(trainer, "evaluate", course_of)
    train(*recipe(*settings, "training.max_steps=6"))
    folder = train(*recipe(*settings, "training.max_steps=8")).folder  # resumed: the best so far is known
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval_loss_code"] for line in lines if "eval_loss" in line] == [0.7, 0.5, 0.6, 0.65]
    saved = load_file(folder / "final" / "adapter_model.safetensors")
    kept = load_file(folder / "checkpoint-4" / "trainable.safetensors")
    assert all(value.equal(kept[name.replace(".weight", ".default.weight")]) for name, value in saved.items())
