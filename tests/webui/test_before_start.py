"""What would stop a recipe after its start is told before: the run folder, and the data."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from halftune_webui.recipes.recipe import examine
from halftune_webui.runs import before_start
from halftune_webui.runs.before_start import obstacles
from halftune_webui.settings import Settings

RECIPE = """\
model: {name_or_path: builtin:qwen2-tiny}
data: {train: rows.jsonl, eval_split: 64}
training: {output_dir: runs/x}
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    root = tmp_path.resolve()
    return Settings((root,), root / "runs")


def rows(count: int, different: int) -> None:
    lines = [json.dumps({"prompt": f"Add {n % different}.", "completion": "It is.", "id": n}) for n in range(count)]
    Path("rows.jsonl").write_text("\n".join(lines) + "\n")


def places(text: str, settings: Settings) -> list[str]:
    return [problem.where for problem in obstacles(examine(text, settings), settings)]


@pytest.mark.parametrize(
    ("count", "different", "change", "found"),
    [
        (96, 8, {}, ["data.eval_split"]),  # 96 rows of 8 kinds: copies are held out together
        (64, 64, {}, ["data.eval_split"]),
        (65, 65, {}, []),
        (96, 8, {"eval_split: 64": "eval_split: 0.5"}, []),
        (96, 8, {"data: {train: rows.jsonl": "data: {train: [rows.jsonl, builtin:python-docs]"}, []),
    ],
)
def test_more_is_held_out_than_there_is(
    settings: Settings, count: int, different: int, change: dict[str, str], found: list[str]
) -> None:
    rows(count, different)
    text = RECIPE
    for old, new in change.items():
        text = text.replace(old, new)
    assert places(text, settings) == found


def test_a_malformed_row_is_told_until_it_is_corrected(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(70, 70)
    good, text = Path("rows.jsonl").read_text(), RECIPE.replace(", eval_split: 64", "")
    Path("rows.jsonl").write_text(good + "{}\n{")
    assert len(places(text, settings)) == 1
    Path("rows.jsonl").write_text(good)
    assert places(text, settings) == []
    with monkeypatch.context() as patch:  # nothing has changed that says how data is read
        patch.setattr(before_start, "validate_data", lambda config: pytest.fail("read again"))
        assert places(text.replace("{output_dir", "{learning_rate: 0.1, output_dir"), settings) == []
    Path("rows.jsonl").write_text("")
    os.utime("rows.jsonl", (1, 1))
    assert examine(text, settings).problems


def test_a_folder_in_use_is_told_at_its_field(settings: Settings) -> None:
    rows(70, 70)
    run = settings.runs / "x"
    run.mkdir(parents=True)
    assert places(RECIPE, settings) == []
    (run / "resolved.yaml").write_text("{}")
    assert places(RECIPE, settings) == []  # nothing was trained in there
    (run / "metrics.jsonl").write_text("{}\n")
    assert places(RECIPE, settings) == ["training.output_dir"]
    (run / "resolved.yaml").unlink()
    assert places(RECIPE, settings) == ["training.output_dir"]  # other things
    assert places("training: 3\n", settings) == []  # the recipe's own problems come first
