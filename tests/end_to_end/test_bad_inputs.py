"""The first mistakes that people make: each gets a clear message and exit code 2, without a wait for torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = """\
model: {name_or_path: "builtin:qwen2-tiny"}
precision: fp32
data:
  train: rows.jsonl
  max_length: 64
training:
  output_dir: run
  max_steps: 1
"""
ROW = json.dumps({"prompt": "1 + 1?", "completion": "2"})

# Runs a verb in a process of its own and reports whether torch was imported.
PROBE = """
import sys
from halftune.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print("TORCH" if "torch" in sys.modules else "NO-TORCH", file=sys.stderr)
    raise
"""


def run(folder: Path, *arguments: str) -> tuple[int, str, bool]:
    """(exit code, standard error, whether torch was imported) of a verb."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr, "NO-TORCH" not in done.stderr


def train(folder: Path, text: str, rows: str = ROW) -> tuple[int, str, bool]:
    (folder / "x.yaml").write_text(text)
    (folder / "rows.jsonl").write_text(rows)
    return run(folder, "train", "--config", "x.yaml")


CONFIG_MISTAKES = {
    "misspelt key": (
        GOOD.replace("max_steps", "max_stepz"),
        ["x.yaml:8", "max_stepz", "did you mean training.max_steps"],
    ),
    "unknown key": (GOOD + "colour: blue\n", ["x.yaml:9", "colour", "unknown key"]),
    "key in the wrong section": (GOOD + "learning_rate: 1\n", ["x.yaml:9", "training.learning_rate"]),
    "wrong type": (GOOD.replace("max_steps: 1", "max_steps: soon"), ["x.yaml:8", "training.max_steps", "soon"]),
    "a word for a boolean": (GOOD + '  torch_compile: "no"\n', ["x.yaml:9", "torch_compile", "true or false"]),
    "impossible pair": (GOOD + "attention: fa2\n", ["precision", "attention", "fp32", "fa2"]),
    "missing file": (GOOD.replace("rows.jsonl", "rowz.jsonl"), ["x.yaml:4", "rowz.jsonl"]),
    "unknown builtin": (GOOD.replace("qwen2-tiny", "qwen2-tin"), ["x.yaml:1", "builtin:qwen2-tiny"]),
    "both bf16 and fp16": (GOOD.replace("precision: fp32", "bf16: true\nfp16: true"), ["bf16", "fp16"]),
    "fp16 on a CPU": (GOOD.replace("fp32", "fp16"), ["fp16", "CPU"]),
    "duplicate key": (GOOD + "precision: bf16\n", ["x.yaml:9", "precision", "line 2"]),
    "tab": (GOOD.replace("  train:", "\ttrain:"), ["x.yaml:4", "tab"]),
    "not YAML": ("model: [", ["x.yaml"]),
    "empty": ("", ["x.yaml", "empty"]),
}


@pytest.mark.parametrize("name", CONFIG_MISTAKES)
def test_mistake_in_the_configuration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text, expected = CONFIG_MISTAKES[name]
    code, error, torch_imported = train(tmp_path, text)
    assert code == 2, error
    assert "Traceback" not in error
    assert not torch_imported, "the user waited for torch"
    for part in expected:
        assert part in error, f"{part!r} is not in: {error}"


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("max_steps", "max_stepz").replace("fp32", "fp31").replace("rows.jsonl", "gone.jsonl")
    code, error, _ = train(tmp_path, text + "  seed: x\n")
    assert code == 2
    for part in ("max_stepz", "fp31", "gone.jsonl", "training.seed"):
        assert part in error


DATA_MISTAKES = {
    "malformed row": (ROW + "\n{broken\n", ["rows.jsonl", "2"]),
    "row without an answer": (ROW + "\n" + json.dumps({"prompt": "x"}), ["rows.jsonl", "2", "answer"]),
    "empty set": ("", ["rows.jsonl", "empty"]),
    "unknown columns": (
        json.dumps({"question": "x", "answer": "y"}),
        ["columns:", "prompt: question", "completion: answer"],
    ),
}


@pytest.mark.parametrize("name", DATA_MISTAKES)
def test_mistake_in_the_data(name: str, tmp_path: Path) -> None:
    rows, expected = DATA_MISTAKES[name]
    code, error, _ = train(tmp_path, GOOD, rows)
    assert code == 2, error
    assert "Traceback" not in error
    for part in expected:
        assert part in error, f"{part!r} is not in: {error}"


def test_bf16_on_a_t4_is_refused_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(GOOD.replace("fp32", "bf16"))
    (tmp_path / "rows.jsonl").write_text(ROW)
    code, error, torch_imported = run(tmp_path, "plan", "--config", "x.yaml", "--hardware", "t4")
    assert code == 2
    assert not torch_imported
    assert "bf16" in error
    assert "T4" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("arguments", [("trian",), ("train", "--config", "gone.yaml"), ("plan", "--config", ".")])
def test_mistake_on_the_command_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    code, error, torch_imported = run(tmp_path, *arguments)
    assert code == 2
    assert "Traceback" not in error
    assert not torch_imported
