"""On the terminal users see halftune's lines only: other packages are not heard, and not imported without need."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
import tiny_images
from lines import foreign
from patience import LIMIT
from ports import port

from halftune.core.optional import UNUSED, version_of

# Runs verbs one after the other; notes their exit codes, and which of the packages that few runs need were imported.
VERBS = f"""
import json
import sys

from halftune.cli import run_verb

codes = [run_verb(words[0], words[1:]) for words in json.loads(sys.argv[1])]
with open("noted.json", "w") as file:
    json.dump([codes, [name for name in {UNUSED} if sys.modules.get(name) is not None]], file)
"""
TREE = {
    "model": {"name_or_path": "builtin:qwen2-tiny"},
    "adapter": {"type": "lora", "rank": 4},
    "data": {"train": "builtin:number-formats", "max_length": 64},
    "training": {"output_dir": "run", "max_steps": 2, "per_device_train_batch_size": 2},
}
TRAIN = ["train", "--config", "x.yaml"]
# What is imported once is silent the second time: each of these has a process of its own. The packages that it needs.
ALONE: dict[str, tuple[list[list[str]], list[str]]] = {
    "chat": ([["chat", "run", "--prompt", "How wide is bf16?"]], []),
    "export": ([["export", "run", "--output", "merged"]], []),
    "doctor": ([["doctor"], ["doctor", "--config", "x.yaml"]], []),
    "data": ([["data", "--config", "images.yaml"]], []),
    "certify": ([["certify", "builtin:qwen2-tiny"]], []),
    "bitsandbytes": (
        [
            [*TRAIN, "training.optim=adamw_8bit", "training.output_dir=adamw"],
            [*TRAIN, "model.quantization=nf4", "training.output_dir=nf4"],
        ],
        ["bitsandbytes"],
    ),
    "torchao": ([[*TRAIN, "training.optim=adamw_torch_8bit", "training.output_dir=torchao"]], ["torchao"]),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(version_of, UNUSED)), reason="packages that are to be silent are not installed"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, one with images, and a run that ``train`` has finished."""
    folder = tmp_path_factory.mktemp("quiet")
    (folder / "x.yaml").write_text(json.dumps(TREE))
    model = tiny_images.image_model(folder / "model", "qwen2_5_vl")
    data = {"train": str(tiny_images.write_rows(folder, tiny_images.ROWS)), "images": True}
    (folder / "images.yaml").write_text(json.dumps({**TREE, "model": {"name_or_path": str(model)}, "data": data}))
    check(folder, [["plan", "--config", "x.yaml"], TRAIN], [])
    return folder


def run(folder: Path, words: list[str]) -> None:
    """A process ends well, and no other package has printed a line on standard error."""
    done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert foreign(done.stderr) == []


def check(folder: Path, verbs: list[list[str]], needed: list[str]) -> None:
    """The same of verbs, which have imported what they need and no more."""
    run(folder, [sys.executable, "-c", VERBS, json.dumps(verbs)])
    assert json.loads((folder / "noted.json").read_text()) == [[0] * len(verbs), needed]


@pytest.mark.parametrize("name", ALONE)
def test_only_halftunes_lines_are_seen(place: Path, name: str) -> None:
    check(place, *ALONE[name])


def test_two_processes_are_as_quiet(place: Path) -> None:
    own = ["distributed.num_processes=2", f"distributed.main_process_port={port()}", "training.output_dir=two"]
    run(place, [sys.executable, "-m", "halftune", *TRAIN, *own])


def test_the_web_ui_starts_and_ends_without_a_word_of_others(place: Path) -> None:
    pytest.importorskip("gradio", reason="the web UI's package is not installed")
    words = [sys.executable, "-m", "halftune", "webui", "--port", "0"]
    with (place / "stderr.txt").open("w+") as errors:
        server = subprocess.Popen(words, cwd=place, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert server.stdout is not None
        try:
            ready, _, _ = select.select([server.stdout], [], [], LIMIT)
            first = server.stdout.readline() if ready else ""
            with urlopen(f"{first.split()[-1]}/gradio_api/heartbeat/page", timeout=LIMIT) as page:
                page.readline()  # an open page, whose request never ends
                server.send_signal(signal.SIGINT)
                server.wait(LIMIT)
        finally:
            server.kill()
            server.wait()
        errors.seek(0)
        said = errors.read()
    assert first.startswith("halftune webui: http://"), said
    assert foreign(said) == []
