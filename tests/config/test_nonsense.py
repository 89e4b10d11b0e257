"""Values that no run can mean: addresses and control characters in paths, shares of nothing, folders that are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halftune.config.load import read_draft

RECIPE = {
    "model": {"name_or_path": "builtin:qwen2-tiny"},
    "data": {"train": [{"path": "builtin:motions"}]},
    "training": {"output_dir": "out"},
}


def codes(*overrides: str, **changes: dict[str, object]) -> list[str]:
    text = json.dumps({name: {**section, **changes.get(name, {})} for name, section in RECIPE.items()})
    return [problem.code for problem in read_draft(Path("recipe.yaml"), text, overrides).problems]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "name", ["http://x/y", "s3://b/c", "file:///x", "con\x01trol", "a\nb", "a\x7fb", "a\x00b", " "]
)
def test_an_output_folder_that_is_no_path(name: str) -> None:
    assert codes(training={"output_dir": name}) == ["config.not_a_path"]


@pytest.mark.parametrize("key", ["data.media_folder", "model.tokenizer", "model.name_or_path", "model.chat_template",
                                 "data.train", "data.eval", "training.resume"])  # fmt: skip
def test_no_path_is_an_address(key: str) -> None:
    assert len(codes(f"{key}=http://x/y")) == 1


def test_usual_paths() -> None:
    assert codes() == []
    assert codes(training={"output_dir": "läufe/ein lauf:2"}) == []


@pytest.mark.parametrize("key", ["training.save_steps", "training.eval_steps", "training.num_train_epochs",
                                 "data.eval_split"])  # fmt: skip
def test_a_share_of_nothing(key: str) -> None:
    more = () if key == "data.eval_split" else ("data.eval=builtin:number-formats-test",)
    (code,) = codes(f"{key}=1e-30", *more)
    assert code in ("config.invalid_value", "config.out_of_range")
    assert codes(f"{key}=0.01", *more) == []


def test_weights_of_sources() -> None:
    assert codes(data={"train": [{"path": "builtin:motions", "weight": 1e-30}]}) == ["config.out_of_range"]


@pytest.mark.parametrize("key", ["model.name_or_path", "model.tokenizer"])
def test_a_run_inside_of_what_it_reads(key: str) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    assert "config.output_dir_unusable" in codes(f"{key}=model", "training.output_dir=model/run")
    assert "config.output_dir_unusable" not in codes(f"{key}=model", "training.output_dir=model-run")


def test_a_tokenizer_that_is_neither_a_folder_nor_an_id() -> None:
    assert codes("model.tokenizer=linear") == ["model.not_found"]
    assert codes("model.tokenizer=owner/name") == []
