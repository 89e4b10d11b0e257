"""An error about a key that is found after loading names the line that the user wrote, and none that nobody wrote."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from halftune.cli.overrides import load_from, place
from halftune.core.errors import PlanError

RECIPE = """\
model: {name_or_path: "builtin:qwen2-tiny"}
data: {train: "builtin:python-docs"}
training: {output_dir: run}
adapter:
  type: lora
"""


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(RECIPE)
    args = argparse.Namespace(config="x.yaml", overrides=["precision=bf16"], set=[])
    load_from(args)
    return args


@pytest.mark.parametrize(
    ("where", "shown"),
    [
        ("adapter.type", "x.yaml:5: adapter.type"),
        ("adapter", "x.yaml:5: adapter"),
        ("precision", "command line: precision"),
        ("attention", "attention"),  # nobody wrote it
        ("adapter.target_modules", "adapter.target_modules"),
        ("rows.jsonl line 3", "rows.jsonl line 3"),
        ("", ""),
    ],
)
def test_where(where: str, shown: str, args: argparse.Namespace) -> None:
    error = PlanError("it cannot be", where=where, code="plan.does_not_fit")
    place(error, args)
    assert error.where == shown


def test_a_folder_with_the_name_of_a_key_is_the_folder(args: argparse.Namespace) -> None:
    os.mkdir("adapter")
    error = PlanError("it cannot be", where="adapter", code="plan.does_not_fit")
    place(error, args)
    assert error.where == "adapter"


def test_an_error_before_anything_was_loaded() -> None:
    error = PlanError("it cannot be", where="adapter", code="plan.does_not_fit")
    place(error, argparse.Namespace())
    assert error.where == "adapter"
