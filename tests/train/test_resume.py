"""Going on with a run: which checkpoint is taken, what is refused, and that nothing is lost or counted twice."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from halftune.core import atomic
from halftune.core.errors import ConfigError, TrainingError
from halftune.core.manifest import MANIFEST, MARKER, damage, seal
from halftune.train.run_folder.checkpoints import checkpoints, newest_valid, rotate
from halftune.train.run_folder.start_or_resume import already_finished
from halftune.train.trainer import train

UNEQUAL = {"seconds", "eval_seconds", "time", "memory_bytes"}
FILES = ("trainable.safetensors", "optimizer.safetensors", "state.json")
# Neither saves nor lines of metrics nor evaluations fall together.
SETTINGS = (
    "adapter.dropout=0.1",
    "training.save_steps=2",
    "training.max_steps=6",
    "training.logging_steps=4",
    "data.eval_split=8",
    "training.eval_steps=3",
    "training.save_total_limit=9",
)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in UNEQUAL} for line in lines]


def same_end(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "final" / "adapter_model.safetensors") for folder in (one, other))
    return metrics(one) == metrics(other) and a.keys() == b.keys() and all(a[n].equal(b[n]) for n in a)


def flip(path: Path, place: float) -> None:
    """Flips a bit at a share of a file's length."""
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 4
    path.write_bytes(data)


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    """Runs that several tests look at."""
    return {}


@pytest.fixture
def whole(recipe, made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of SETTINGS that nothing happened to."""
    if "whole" not in made:
        folder = tmp_path_factory.mktemp("whole") / "run"
        made["whole"] = train(*recipe(*SETTINGS, f"training.output_dir={folder}")).folder
    return made["whole"]


@pytest.fixture
def stopped(whole: Path, tmp_path: Path) -> Path:
    """The same run, killed after its last checkpoint and before its result."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "finished.json").unlink()
    shutil.rmtree(folder / "final")
    return folder


def but(**changes: object) -> tuple[str, ...]:
    """SETTINGS with other values of ``training``."""
    kept = tuple(item for item in SETTINGS if item.partition("=")[0].removeprefix("training.") not in changes)
    return (*kept, *(f"training.{key}={value}" for key, value in changes.items()))


@pytest.mark.parametrize("name", [*FILES, MARKER])
def test_every_flipped_bit_and_every_cut_is_seen(tmp_path: Path, name: str) -> None:
    for index, place in enumerate((0.0, 0.3, 0.999)):
        folder = tmp_path / str(index)
        folder.mkdir()
        for file in FILES:
            (folder / file).write_bytes(os.urandom(500))
        seal(folder)
        assert damage(folder, thorough=True) == ""
        flip(folder / name, place)
        assert damage(folder, thorough=True)
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    assert damage(folder, thorough=False)
    (folder / name).unlink()
    assert damage(folder, thorough=False)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(recipe, stopped: Path, whole: Path, caplog) -> None:
    folder = stopped
    caplog.set_level("INFO")
    flip(folder / "checkpoint-6" / "optimizer.safetensors", 0.5)
    (folder / "checkpoint-4" / MARKER).unlink()
    assert train(*recipe(*SETTINGS)).step == 6
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "checkpoint-6: optimizer.safetensors has a wrong checksum" in said
    assert "checkpoint-4: checkpoint.json cannot be read: No such file" in said
    assert f"resuming from {folder / 'checkpoint-2'}" in said
    assert same_end(folder, whole)
    assert sorted(path.name for path in (folder / "set-aside").iterdir()) == ["checkpoint-4", "checkpoint-6"]


def test_half_written_things_are_tidied_up_and_an_old_one_comes_back(recipe, stopped: Path, whole: Path) -> None:
    folder = stopped
    (folder / "checkpoint-6").rename(folder / ".checkpoint-6.old")  # killed between two renames
    for name in (".checkpoint-8.writing", ".final.writing"):
        (folder / name).mkdir()
        (folder / name / "trainable.safetensors").write_bytes(b"half")
    (folder / ".report.html.writing").write_text("half")
    train(*recipe(*SETTINGS))
    assert same_end(folder, whole)
    assert not list(folder.glob(".*.writing"))
    assert newest_valid(folder) == folder / "checkpoint-6"


def test_a_named_checkpoint_sets_later_ones_aside(recipe, stopped: Path, whole: Path, caplog) -> None:
    folder = stopped
    train(*recipe(*SETTINGS, f"training.resume={folder / 'checkpoint-4'}"))
    assert same_end(folder, whole)
    assert [path.name for path in (folder / "set-aside").iterdir()] == ["checkpoint-6"]
    assert any("moved to" in record.getMessage() for record in caplog.records)


def test_a_checkpoint_of_another_folder_must_be_of_the_same_configuration(
    recipe, stopped: Path, tmp_path: Path
) -> None:
    folder = stopped
    named = f"training.resume={folder / 'checkpoint-4'}"
    other = f"training.output_dir={tmp_path / 'other'}"
    with pytest.raises(ConfigError, match=r"adapter\.dropout was 0\.1, now 0\.2"):
        train(*recipe("adapter.dropout=0.2", *SETTINGS[1:], named, other))
    assert not (tmp_path / "other" / "resolved.yaml").exists()
    flip(folder / "checkpoint-4" / "state.json", 0.5)
    with pytest.raises(TrainingError, match=r"not a valid checkpoint: state\.json has a wrong checksum"):
        train(*recipe(*SETTINGS, named, other))


def test_harmless_changes_are_allowed_and_said(recipe, stopped: Path, caplog) -> None:
    caplog.set_level("INFO")
    train(*recipe(*but(logging_steps=1, max_steps=7)))
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "which is allowed: training.logging_steps was 4, now 1; training.max_steps was 6, now 7" in said


def test_never_leaves_a_used_folder_as_it_is(recipe, stopped: Path) -> None:
    folder = stopped
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ConfigError, match="resume is 'never'"):
        train(*recipe(*SETTINGS, "training.resume=never"))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"} == before


def test_other_packing_code_is_refused(recipe, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = "halftune.train.batches.feed.Feed.batches"
    real = __import__("halftune.train.batches.feed", fromlist=["Feed"]).Feed.batches
    monkeypatch.setattr(batches, lambda self, epoch: list(reversed(real(self, epoch))))
    with pytest.raises(ConfigError, match="order of the data differs"):
        train(*recipe(*SETTINGS))


def test_a_run_that_stopped_early_stays_stopped(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (*SETTINGS[:1], "training.save_steps=1", "training.max_steps=9", "training.logging_steps=4")
    settings += ("data.eval_split=8", "training.eval_steps=1", "training.early_stopping_patience=2")

    def worse(*_: Any) -> dict[str, float]:
        return {"eval_loss": 1.0 + next(numbers)}

    monkeypatch.setattr("halftune.train.trainer.evaluate", worse)
    numbers = iter(range(99))
    folder = train(*recipe(*settings)).folder
    assert newest_valid(folder) == folder / "checkpoint-3"
    shutil.copytree(folder, tmp_path / "whole")
    (folder / "finished.json").unlink()
    numbers = iter(range(99))
    assert "stopped early" in train(*recipe(*settings)).message
    assert same_end(folder, tmp_path / "whole")


def test_a_damaged_best_is_not_passed_off_as_the_result(recipe, stopped: Path, whole: Path) -> None:
    folder = stopped
    best = json.loads((folder / "checkpoint-6" / "state.json").read_text())["best"][0]
    assert best == 6
    on_save, taken = "halftune.train.finish.load_weights", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_save, lambda *_: taken.append(1))
        patch.setattr("halftune.train.trainer.evaluate", lambda *_: {"eval_loss": 99.0})
        patch.setattr("halftune.train.finish.find_damage", lambda *_, **__: "it is broken")
        assert "NOT the best" in train(*recipe(*but(load_best="true", max_steps=7))).message
    assert not taken


@pytest.mark.parametrize("text", ["", '{"step": ', "[1]"])
def test_a_damaged_finished_file_is_no_end(recipe, stopped: Path, whole: Path, text: str) -> None:
    folder = stopped
    (folder / "finished.json").write_text(text)
    assert "trained 6 steps" in train(*recipe(*SETTINGS)).message
    assert same_end(folder, whole)


def flip_weights(final: Path) -> None:
    flip(final / "adapter_model.safetensors", 0.9)


def link_back(final: Path, name: str) -> None:
    (final / name).symlink_to(final.parent / name)


RESULT_FAULTS: dict[str, Callable[[Path], object]] = {
    "flipped": flip_weights,
    "missing": lambda final: (final / "tokenizer.json").unlink(),
    "empty": lambda final: (final / "adapter_config.json").write_text(""),
    "no manifest": lambda final: (final / MANIFEST).unlink(),
    "another manifest": lambda final: [flip_weights(final), (final / MANIFEST).unlink(), seal(final, MANIFEST)],
    "gone": shutil.rmtree,
    "link": lambda final: [shutil.move(final / "tokenizer.json", final.parent), link_back(final, "tokenizer.json")],
    "a file more": lambda final: (final / "adapter_model.bin").write_bytes(b"x"),
}


@pytest.mark.parametrize("fault", RESULT_FAULTS)
def test_a_damaged_result_is_made_anew(recipe, whole: Path, tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    assert "already complete" in train(*recipe(*SETTINGS)).message
    RESULT_FAULTS[fault](folder / "final")
    assert not already_finished(recipe(*SETTINGS)[0])
    assert train(*recipe(*SETTINGS)).step == 6
    assert same_end(folder, whole)
    assert not damage(folder / "final", thorough=True, marker=MANIFEST)
    assert (folder / "set-aside" / "final").exists() == (fault != "gone"), "nothing of the user's is written over"
    assert "already complete" in already_finished(recipe(*SETTINGS)[0])


def test_a_damaged_result_without_checkpoints_is_refused(recipe, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for checkpoint in checkpoints(folder):
        shutil.rmtree(checkpoint)
    flip_weights(folder / "final")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        train(*recipe(*SETTINGS))


def test_a_result_of_an_earlier_version_is_finished(recipe, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "final" / MANIFEST).unlink()
    (folder / "finished.json").write_text('{"step": 6, "time": 1.0}')
    assert "already complete" in train(*recipe(*SETTINGS)).message


def test_a_kill_between_a_save_and_its_rotation_leaves_no_checkpoint_too_many(recipe, stopped: Path) -> None:
    left = stopped / ".checkpoint-1.writing"
    train(*recipe(*but(save_total_limit=1)))
    assert [path.name for path in checkpoints(stopped)] == ["checkpoint-6"]
    left.mkdir()  # a removal that failed half-way
    rotate(stopped, limit=None, needed=[])
    assert not left.exists()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"model: [", b"just words"])
def test_a_damaged_record_of_the_configuration_is_said(recipe, stopped: Path, content: bytes) -> None:
    folder = stopped
    (folder / "resolved.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"resolved\.yaml: what the run in this folder is cannot be read"):
        train(*recipe(*SETTINGS))
    assert len(checkpoints(folder)) == 3


def test_rotation_keeps_the_newest_and_the_best_and_counts_only_whole_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in FILES:
            (folder / name).write_text("{}")
        seal(folder)
    (tmp_path / "checkpoint-4" / "state.json").write_text("{")  # damaged: no help to anyone
    rotate(tmp_path, limit=2, needed=[tmp_path / "checkpoint-1"])
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-5"]
    rotate(tmp_path, limit=1, needed=[tmp_path / "checkpoint-1"])
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-5"]
    assert not list(tmp_path.glob(".*"))


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    rename = Path.rename

    def noted(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name}")
        return rename(path, target)

    monkeypatch.setattr(atomic, "sync", lambda path: events.append(f"sync {path.name}"))
    monkeypatch.setattr(Path, "rename", noted)
    for _ in range(2):
        with atomic.whole_folder(tmp_path / "x") as beside:
            (beside / "a").write_text("a")
    first = ["sync a", "sync .x.writing", "rename .x.writing", f"sync {tmp_path.name}"]
    assert events == [*first, *first[:2], "rename x", *first[2:]]


def test_the_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[int]()
    monkeypatch.setattr(os, "fsync", waited.append)
    atomic.sync(tmp_path)
    assert waited


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_cannot_be_finished_leaves_what_was_there(tmp_path: Path, there: bool) -> None:
    target = tmp_path / "x"
    if there:
        target.mkdir()
        (target / "old").write_text("old")

    def broken() -> None:
        with atomic.whole_folder(target) as beside:
            (beside / "new").write_text("new")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        broken()
    assert [path.name for path in tmp_path.rglob("*")] == (["x", "old"] if there else [])


def reseal(checkpoint: Path) -> None:
    """Makes a manifest anew, as somebody who mends a checkpoint by hand would."""
    (checkpoint / MARKER).unlink()
    seal(checkpoint)


def test_what_a_hand_or_another_version_left_gives_way_to_the_one_before(recipe, stopped: Path, whole, caplog) -> None:
    """Checksums alone do not tell: state.json lacks something, or the manifest has forgotten a file."""
    caplog.set_level("INFO")
    newest, middle, oldest = (stopped / f"checkpoint-{step}" for step in (6, 4, 2))
    state = json.loads((newest / "state.json").read_text())
    del state["random"]
    (newest / "state.json").write_text(json.dumps(state))
    (middle / "optimizer.safetensors").unlink()
    reseal(newest)
    reseal(middle)
    assert not damage(newest, thorough=True)
    assert not damage(middle, thorough=True)
    train(*recipe(*SETTINGS))
    assert same_end(stopped, whole)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "checkpoint-6: state.json has no 'random'" in said
    assert "checkpoint-4: checkpoint.json does not list optimizer.saf" in said
    assert f"resuming from {oldest}" in said


def test_other_versions_are_said(recipe, stopped: Path, caplog, monkeypatch) -> None:
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT")
    state = json.loads((stopped / "checkpoint-6" / "state.json").read_text())
    assert {"halftune", "python", "torch", "transformers", "peft"} <= state["made_with"].keys()
    state["made_with"] |= {"torch": "1.0", "threads": "77"}
    (stopped / "checkpoint-6" / "state.json").write_text(json.dumps(state))
    reseal(stopped / "checkpoint-6")
    train(*recipe(*SETTINGS))
    (said,) = (text for record in caplog.records if "bit-identical" in (text := record.getMessage()))
    assert said.startswith("the checkpoint was written with ONEDNN_DEFAULT_FPMATH_MODE unset, threads 77, torch 1.0, ")
    assert "this process has ONEDNN_DEFAULT_FPMATH_MODE STRICT, threads" in said


def test_a_run_that_ended_before_its_first_step_blocks_no_folder(recipe, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(*recipe("training.max_steps=1"))
    for name in ("final", "metrics.jsonl", "finished.json"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    changed = ("training.max_steps=1", "training.learning_rate=0.5", "training.resume=never")
    assert train(*recipe(*changed)).step == 1
    with pytest.raises(ConfigError, match="already contains a run"):
        train(*recipe(*changed))
