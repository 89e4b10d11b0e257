"""Runs on streamed data: resume after a kill, several processes, what does not go together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from process_group import curve, in_processes, train_all

from halftune.config.load import load_config
from halftune.core.errors import ConfigError
from halftune.train.trainer import Trainer, train

STREAMED = ("data.streaming={enabled: true, buffer: 40}", "training.max_steps=14", "training.save_steps=2")
PACKED = ("data.packing=true", "data.max_length=128", "training.per_device_train_batch_size=2")


def result(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "final").glob("*.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "more"), [(1, PACKED), (2, ())], ids=["packed", "two processes, padded"])
def test_a_killed_run_ends_as_if_nothing_had_happened(recipe, tmp_path: Path, size: int, more) -> None:
    def made(name: str):
        return recipe(*STREAMED, *more, f"training.output_dir={tmp_path / name}", world_size=size)

    def killed(rank: int) -> None:
        stepped = Trainer._stepped

        def kill(self, epoch, metrics) -> None:
            stepped(self, epoch, metrics)
            if self.run.step == stops:  # behind a checkpoint in the middle of a buffer
                os.kill(os.getpid(), signal.SIGKILL)

        Trainer._stepped = kill  # type: ignore[method-assign]
        train_all([one])(rank)

    whole, one = made("whole"), made("killed")
    assert in_processes(size, train_all([whole])) == [0] * size
    for stops in (7, 9):  # the second checkpoint is in the buffer that the run went on in
        assert -signal.SIGKILL in in_processes(size, killed)
        assert (tmp_path / "killed" / f"checkpoint-{stops - 1}").is_dir()
        assert not (tmp_path / "killed" / f"checkpoint-{stops + 1}").exists()
    assert in_processes(size, train_all([made("killed")])) == [0] * size
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


def test_rows_are_packed_within_a_buffer(recipe, monkeypatch) -> None:
    """Every sample of a buffer once, in rows that are not longer than asked for, and the model keeps them apart."""
    runs = []
    monkeypatch.setattr(Trainer, "train", lambda self: runs.append(self.run))
    train(*recipe(*STREAMED, *PACKED))
    (run,) = runs
    assert run.plan.batch.packing.value
    steps, seen = [], []
    for _, batches in run.feed.steps(0, 14):
        steps.append(batches)
        assert all(batch.fed <= 2 * 128 for batch in batches)
        seen += [sample for batch in batches for sample in batch.examples]
        if run.feed.place(len(steps))["buffer"] == 2:
            break
    first = [sample for sample in seen if sample < 1 << 32]
    assert sorted(first) == list(range(40))
    assert "line" in run.feed.where(steps[-1])


def test_a_longer_run_goes_on_and_another_buffer_does_not(recipe, tmp_path: Path) -> None:
    short, periods = "training.max_steps=3", "training.save_steps=2"
    train(*recipe(STREAMED[0], short, periods))
    with pytest.raises(ConfigError) as caught:
        train(*recipe("data.streaming={enabled: true, buffer: 32}", "training.max_steps=5", periods))
    assert caught.value.code == "train.run_changed"
    train(*recipe(STREAMED[0], "training.max_steps=5", periods))
    assert len(curve(tmp_path / "run")) == 5


@pytest.mark.parametrize(
    ("override", "key", "code"),
    [
        ("training.max_steps=null", "training.max_steps", "config.missing_key"),
        ("training.num_train_epochs=2", "training.num_train_epochs", "config.keys_conflict"),
        ("training.save_steps=epoch", "training.save_steps", "config.keys_conflict"),
        ("training.save_steps=4/epoch", "training.save_steps", "config.keys_conflict"),
        ("data.eval_split=0.1", "data.eval_split", "config.keys_conflict"),
        ("data.deduplicate=true", "data.deduplicate", "config.keys_conflict"),
        ("data.images=true", "data.images", "config.keys_conflict"),
        ("data.train=[{path: builtin:python-docs, samples: 5}]", "data.train[0].samples", "config.keys_conflict"),
        ("method=dpo", "method", "config.keys_conflict"),
        ("data.streaming={buffer: 100}", "data.streaming.buffer", "config.no_effect"),
    ],
)
def test_what_needs_all_rows_is_refused(tmp_path: Path, override: str, key: str, code: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {name_or_path: builtin:qwen2-tiny}\ndata: {train: builtin:python-docs, streaming: true}\n"
        f"training: {{output_dir: {tmp_path / 'run'}, max_steps: 5, save_steps: end}}\n"
    )
    load_config(path)
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert [problem.code for problem in caught.value.problems] == [code]
    assert key in str(caught.value)
