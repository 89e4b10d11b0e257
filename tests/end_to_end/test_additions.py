"""An addition touches at most three files: each example is added to a copy of the sources and trains two steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from additions import ADDITIONS, Addition
from tiny_model import checkpoint

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 3
WITHOUT_A_LINE = "an optimizer without its builder"
# One process imports what is slow, then each example trains in a fork with the sources of its own copy.
TRAIN = """
import os, sys
import accelerate, datasets, peft, torch, transformers

for copy in sys.argv[1:]:
    if (child := os.fork()) == 0:
        log = os.open(f"{copy}/log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1), os.dup2(log, 2)
        sys.path.insert(0, f"{copy}/src")
        sys.argv = ["train", "--config", f"{copy}/recipe.yaml", *open(f"{copy}/overrides").read().split()]
        import halftune.cli
        from halftune.train.callbacks.loss_plot import LossPlot
        LossPlot._draw = lambda *_: None
        assert halftune.cli.__file__.startswith(copy)
        sys.exit(halftune.cli.train_main())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def prepare(addition: Addition, copy: Path) -> None:
    """A copy of the sources with the addition, a recipe and its data."""
    shutil.copytree(ROOT / "src", copy / "src", copy_function=os.symlink)
    test = copy / "tests/data/test_data_formats.py"
    test.parent.mkdir(parents=True)
    test.symlink_to(ROOT / "tests/data/test_data_formats.py")
    addition.apply(copy)
    rows = addition.rows or ({"prompt": "What is 1 and 1?", "completion": "It is 2"},) * 8
    (copy / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint(copy / "model", model_type=addition.model_type, vocab_size=4096)
    recipe = {
        "model": {"name_or_path": str(copy / "model"), "tokenizer": "builtin:qwen2-tiny"},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 4},
        "data": {"train": str(copy / "rows.jsonl"), "max_length": 64, "packing": False},
        "training": {"output_dir": str(copy / "run"), "max_steps": 2, "warmup_ratio": 0, "logging_steps": 1},
        "logging": {"progress": False, "probes": 0},
    }
    (copy / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    (copy / "overrides").write_text(" ".join(addition.overrides))


@pytest.fixture(scope="module")
def copies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of an example → the copy in which it has trained; one of them lacks the file that it needs most.

    Only those that the chosen tests look at.
    """
    chosen = {
        item.callspec.params["addition"].name
        for item in request.session.items
        if hasattr(item, "callspec") and item.originalname == test_it_trains_with_these_files_alone.__name__
    }
    whole = {one.name: one for one in ADDITIONS}
    optimizer = whole["radam"]
    edits = {name: edit for name, edit in optimizer.edits.items() if name != "src/halftune/optim/__init__.py"}
    made = {}
    for name, one in {**whole, WITHOUT_A_LINE: replace(optimizer, edits=edits)}.items():
        if name not in chosen | {WITHOUT_A_LINE}:
            continue
        made[name] = tmp_path_factory.mktemp("copy")
        prepare(one, made[name])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("kernels", "webui"))}
    command = [sys.executable, "-B", "-c", TRAIN, *map(str, made.values())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for copy, code in zip(made.values(), done.stdout.split(), strict=True):
        (copy / "code").write_text(code)
    return made


@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda one: one.what.replace(" ", "-"))
def test_it_touches_three_files_at_most_and_one_is_its_test(addition: Addition) -> None:
    assert len(addition.files) <= MOST_FILES
    if addition.test:
        assert (ROOT / addition.test).is_file()
    else:
        assert any(name.startswith("tests/") for name in addition.files)


@pytest.mark.slow
@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda one: one.what.replace(" ", "-"))
def test_it_trains_with_these_files_alone(copies: dict[str, Path], addition: Addition) -> None:
    copy, (name, text) = copies[addition.name], addition.shows
    assert (copy / "code").read_text() == "0", (copy / "log").read_text()[-2000:]
    assert (copy / "run/metrics.jsonl").read_text().count('"loss"') == 2
    assert text in (copy / name).read_text()


@pytest.mark.slow
def test_a_missing_file_is_noticed(copies: dict[str, Path]) -> None:
    assert (copies[WITHOUT_A_LINE] / "code").read_text() != "0"
