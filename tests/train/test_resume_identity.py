"""What may change between two sittings of a run, and what happens: each row of the table in docs/resume.md."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from halftune.core.errors import ConfigError
from halftune.core.manifest import MARKER, seal
from halftune.model import identity
from halftune.train.checkpoint_list import state_of
from halftune.train.trainer import train

SETTINGS = ("training.max_steps=4", "training.save_steps=2", "training.save_total_limit=9", "data.cache=false")
Place = dict[str, Path]


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    """The run that every test copies, and what it is made of."""
    return {}


@pytest.fixture
def place(
    recipe, made: Place, small_model: Path, rows_file: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Place:
    """A run stopped after its second step, with a model and data of its own: ``model``, ``rows``, ``eval``, ``run``."""
    if not made:
        whole = tmp_path_factory.mktemp("whole")
        shutil.copytree(small_model, whole / "model")
        shutil.copy(rows_file, whole / "rows.jsonl")
        (whole / "eval.jsonl").write_text("".join(rows_file.read_text().splitlines(keepends=True)[:8]))
        made |= {name: whole / name for name in ("model", "rows.jsonl", "eval.jsonl", "run")}
        train(*recipe(*settings(made)))
        shutil.rmtree(whole / "run" / "final")
        (whole / "run" / "finished.json").unlink()
        shutil.rmtree(whole / "run" / "checkpoint-4")
    backup = tmp_path / "backup"
    shutil.copytree(made["run"].parent, backup)
    yield made
    shutil.rmtree(made["run"].parent)  # the run folder names these places: they are put back, not copied
    shutil.copytree(backup, made["run"].parent)


def settings(place: Place, *more: str) -> tuple[str, ...]:
    return (
        *SETTINGS,
        f"model.name_or_path={place['model']}",
        f"data.train={place['rows.jsonl']}",
        f"data.eval={place['eval.jsonl']}",
        f"training.output_dir={place['run']}",
        *more,
    )


def scaled(place: Place) -> None:
    """Another base model of the same shape, as a mended upload would be."""
    path = place["model"] / "model.safetensors"
    save_file({name: tensor * 1.05 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


def token_added(place: Place) -> None:
    path = place["model"] / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["added_tokens"][-1]["single_word"] = True
    path.write_text(json.dumps(tree))


def template(place: Place) -> None:
    path = place["model"] / "chat_template.jinja"
    path.write_text("{# mended #}" + path.read_text())


def rows(place: Place, name: str = "rows.jsonl") -> None:
    """Other words of as many tokens in a row that no sample of the fingerprint holds."""
    lines = place[name].read_text().splitlines(keepends=True)
    number = next(n for n in range(5, len(lines)) if "then 7" in lines[n] or "then 5" in lines[n])
    lines[number] = lines[number].replace("then 7", "then 8").replace("then 5", "then 6")
    place[name].write_text("".join(lines))


def eval_rows(place: Place) -> None:
    path = place["eval.jsonl"]
    path.write_text(path.read_text().replace("Add", "Sum", 1))


def code(place: Place) -> None:
    (place["model"] / "config.json").write_text((place["model"] / "config.json").read_text() + "\n")


CHANGES: dict[str, tuple[Callable[[Place], None], str]] = {
    "model": (scaled, "model.safetensors"),
    "tokenizer": (token_added, "tokenizer.json"),
    "template": (template, "chat template"),
    "train_data": (rows, "training data"),
    "eval_data": (eval_rows, "evaluation data"),
}


@pytest.mark.parametrize("part", CHANGES)
def test_what_a_run_is_made_of_may_not_change_unless_it_is_allowed(recipe, place: Place, caplog, part: str) -> None:
    change, named = CHANGES[part]
    change(place)
    before = sorted(place["run"].rglob("*"))
    with pytest.raises(ConfigError, match=named) as caught:
        train(*recipe(*settings(place)))
    assert f"training.allow_changes: [{part}]" in str(caught.value)
    assert sorted(place["run"].rglob("*")) == before, "a start that is refused changes nothing"
    assert train(*recipe(*settings(place, f"training.allow_changes=[{part}]"))).step == 4
    log = (place["run"] / "train.log").read_text()
    assert "training.allow_changes permits" in log
    assert named in log
    assert state_of(place["run"] / "checkpoint-4")["best"][0] == 4, "an evaluation of before is not compared with"
