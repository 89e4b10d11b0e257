"""Loss parity with transformers' Trainer and peft on the same batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from halftune.data.batch import Batch
from halftune.model.result.save import trainable_state
from halftune.train.run_folder.start_or_resume import RunFolder
from halftune.train.setup import build
from halftune.train.trainer import train


class _Rows(torch.utils.data.Dataset):
    """The feed's micro-batches, one a row, so that both trainers see the same tensors."""

    def __init__(self, batches: list[dict]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict:
        return self.batches[index]


class _Losses(TrainerCallback):
    def __init__(self) -> None:
        self.curve: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            self.curve.append(logs["loss"])


def without_positions(batch: Batch) -> dict[str, torch.Tensor | int]:
    return {**batch.inputs, "labels": batch.tokens["labels"]}


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_twenty_steps_equal_transformers_trainer(recipe, losses, tmp_path: Path, adapter: str) -> None:
    settings = (
        "adapter=none" if adapter == "none" else "adapter.rank=8",
        "training.max_steps=20",
        "training.gradient_accumulation_steps=2",
        "training.per_device_train_batch_size=4",
        "training.weight_decay=0.01",
        "training.learning_rate=2e-3",
    )
    loaded, plan = recipe(*settings)
    run = build(loaded, plan, RunFolder(tmp_path / "their-start", None, finished=False))
    initial = {name: value.clone() for name, value in trainable_state(run.model).items()}
    batches = [without_positions(batch) for _, step in run.feed.steps(0, 20) for batch in step]

    ours = losses(train(loaded, plan).folder)

    assert all(torch.equal(value, initial[name]) for name, value in trainable_state(run.model).items())
    recorder = _Losses()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        max_steps=20,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    theirs = Trainer(
        run.model, arguments, train_dataset=_Rows(batches), data_collator=lambda rows: dict(rows[0]),
        callbacks=[recorder],
    )  # fmt: skip
    theirs.train()
    assert len(ours) == len(recorder.curve) == 20
    assert max(abs(a - b) / b for a, b in zip(ours, recorder.curve, strict=True)) < 1e-5
