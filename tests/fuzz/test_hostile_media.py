"""Rows with hostile images and sounds: each is used, or refused by its number; memory stays bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hostile_media import FORMATS, write_hostile
from tiny_audio import audio_model

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.core.errors import DataError
from halftune.data.pipeline import prepare
from halftune.hardware.catalogue import lookup
from halftune.methods import make_method
from halftune.model.files.locate import media_of
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import resolve
from halftune.train.batches.feed import Feed
from halftune.train.setup import media_inputs

MARKERS = {"image": ("<image>", "images"), "audio": ("<audio>", "audios")}
MOST = 768 << 20  # bytes that reading takes: a decoded image of PIL's largest size, in RGB and as it was


class Reader:
    """Tokenises and decodes rows as a run does."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.rows, (self.marker, self.column) = folder / "media" / "rows.jsonl", MARKERS[kind]
        self.rows.write_text("{}\n")  # a config names no empty file
        audio_model(folder / "model", "qwen2_5_omni_thinker")
        tree = {
            "model": {"name_or_path": str(folder / "model")},
            "data": {"train": str(self.rows), "images": True, "audio": True, "packing": False, "max_length": 4096},
            "training": {"output_dir": str(folder / "run"), "per_device_train_batch_size": 2},
        }
        (folder / "recipe.yaml").write_text(json.dumps(tree))
        self.config = load_config(folder / "recipe.yaml").run
        self.plan = resolve(self.config, lookup("cpu"), read_model_facts(self.config.model))
        self.tokenizer = load_tokenizer(self.config.model)
        self.images = media_inputs(self.config, self.tokenizer)

    def read(self, name: str) -> DataError | None:
        """The error of the second of two rows, which has this file; None if it is used."""
        answer = {"role": "assistant", "content": "A red square."}
        good: Any = {"messages": [{"role": "user", "content": "What is red?"}, answer]}
        asked: Any = [{"role": "user", "content": f"{self.marker}What?"}, answer]
        hostile = {"messages": asked, self.column: [name]}
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in (good, hostile)))
        try:
            data = prepare(self.config, self.tokenizer, images=media_of(self.config))
            method = make_method(self.config.method)
            feed = Feed(data.train, self.config, self.plan.batch, method, 0, images=self.images)
            list(feed.micro_batches(feed.rows(0)))
        except DataError as error:
            return error
        return None


def most_memory() -> int:
    """Bytes of resident memory at their most, since that was forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) << 10 for one in lines if one.startswith("VmHWM"))


def hostile(kind: str, many: int, folder: Path) -> tuple[int, int]:
    """Reads so many files; the number of those that are used, and bytes of memory that it took."""
    names, reader, used = write_hostile(folder / "media", kind, many), Reader(folder, kind), 0
    reader.read(names[-1])  # imports
    Path("/proc/self/clear_refs").write_text("5")  # forgets the most
    before = most_memory()
    for name in names:
        error = reader.read(name)
        used += error is None
        if error is not None:
            assert error.code == "data.bad_media", (name, error)
            assert str(error.where).endswith("line 2"), (name, error.where)
    return used, most_memory() - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory was taken")
@pytest.mark.parametrize("many", [20, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_hostile_file_is_used_or_names_its_row(kind: str, many: int, tmp_path: Path) -> None:
    used, taken = hostile(kind, many, tmp_path)
    assert used < many
    assert taken < MOST
