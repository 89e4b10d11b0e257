"""Images and their processor: part of what a run is, and files of strangers."""

from __future__ import annotations

import io
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from test_images import fed, recipe
from tiny_images import asked, write_image

from halftune.cli.preflight import check_inputs
from halftune.config.recipe_facts import run_facts
from halftune.core.errors import ConfigError, HalftuneError
from halftune.data.media import reference
from halftune.data.media.audio import AudioProcessor
from halftune.data.media.reference import BadMedia, decode, refer
from halftune.model.files.locate import media_of
from halftune.train.trainer import train

ROWS = 80  # more than the fingerprint of the samples holds


def start(folder: Path, steps: int, *allowed: str) -> Any:
    data = {"train": str(folder / "rows.jsonl"), "cache": False, "max_length": 64}
    training = {"max_steps": steps, "save_steps": 1, "allow_changes": list(allowed)}
    settings = {"output_dir": str(folder / "run"), "per_device_train_batch_size": 1, **training}
    return train(*recipe(folder, "llava", data=data, training=settings))


def write_rows(folder: Path) -> None:
    for number in range(ROWS):
        write_image(folder / f"{number}.png", 8, 8)
    rows = [asked("<image>What?", images=(f"{number}.png",)) for number in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.filterwarnings("ignore")
def test_another_image_or_processor_is_another_run(tmp_path: Path) -> None:
    write_rows(tmp_path)
    start(tmp_path, 1)
    spared = tmp_path / "79.png"  # no sample of the fingerprint; the same size
    Image.new("RGB", (8, 8), "blue").save(spared)
    with pytest.raises(ConfigError) as caught:
        start(tmp_path, 2)
    assert caught.value.code == "train.run_changed"
    assert start(tmp_path, 2, "train_data").step == 2

    file = tmp_path / "model" / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_mean": [0.9, 0.9, 0.9]}))
    with pytest.raises(ConfigError) as caught:
        start(tmp_path, 3)
    assert file.name in caught.value.what
    assert start(tmp_path, 3, "processor").step == 3


def test_the_middle_of_an_image_counts(tmp_path: Path) -> None:
    picture = Image.new("RGB", (300, 300))
    picture.save(tmp_path / "a.bmp")
    before = refer("a.bmp", tmp_path)
    picture.putpixel((150, 150), (9, 9, 9))
    picture.save(tmp_path / "a.bmp")
    assert refer("a.bmp", tmp_path).digest != before.digest
    with pytest.raises(BadMedia):
        decode(before)


def test_a_processor_runs_no_code_of_its_folder(tmp_path: Path, own_module_cache: None, monkeypatch: Any) -> None:
    loaded, plan = recipe(tmp_path, "llava")
    file = tmp_path / "model" / "preprocessor_config.json"
    named = {"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **named}))
    (file.parent / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # transformers asks where it was not told
    with pytest.raises(HalftuneError) as caught:
        fed(loaded, plan)
    assert caught.value.code == "model.no_image_processor"
    assert not (tmp_path / "ran").exists()


def test_a_feature_extractor_runs_no_code_of_its_folder(tmp_path: Path, own_module_cache: None, monkeypatch) -> None:
    named = {"feature_extractor_type": "Own", "auto_map": {"AutoFeatureExtractor": "own.Own"}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(named))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ValueError, match="custom code"):
        AudioProcessor(str(tmp_path), "qwen2_audio", SimpleNamespace(), None)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("[" * 100_000, "core.file_damaged"),
        ("[1]", "core.file_damaged"),
        ("{", "core.file_damaged"),
        (json.dumps({"size": {"shortest_edge": 200_000}}), "model.no_image_processor"),
        (json.dumps({"image_processor": {"crop_size": {"height": 10**9}}}), "model.no_image_processor"),
        (None, "model.no_image_processor"),
    ],
)
def test_plan_and_training_refuse_the_same_processors(content: str | None, code: str, tmp_path: Path) -> None:
    loaded, _ = recipe(tmp_path, "llava")
    for file in (tmp_path / "model").glob("*processor_config.json"):
        file.unlink()
    if content is not None:
        (tmp_path / "model" / "preprocessor_config.json").write_text(content)
    for check in (lambda: media_of(loaded.run), lambda: check_inputs(loaded, run_facts(loaded.run))):
        with pytest.raises(HalftuneError) as caught:
            check()
        assert caught.value.code == code


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", reference.FORMATS)
def test_damaged_images_are_bad_images(kind: str) -> None:
    buffer, picture = io.BytesIO(), Image.effect_noise((24, 16), 60).convert("RGB")
    exif = Image.Exif()
    exif[0x112], exif[0x10E] = 6, "x" * 50
    picture.save(buffer, kind, **({"exif": exif.tobytes()} if kind in ("JPEG", "PNG", "WEBP") else {}))
    whole, good = buffer.getvalue(), 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(random.choice((1, 2, 5))):
            data[random.randrange(min(len(data), random.choice((60, len(data)))))] = random.randrange(256)
        try:
            decode(refer(bytes(data), None))
            good += 1
        except BadMedia:
            pass
    assert good < 300


@pytest.mark.parametrize("error", [TypeError, KeyError, RuntimeError, OverflowError])
def test_whatever_a_decoder_raises_is_a_bad_image(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "PNG")
    ref = refer(buffer.getvalue(), None)

    def fails(*_: Any) -> Any:
        raise error("a tag of another kind")

    monkeypatch.setattr(reference.ImageOps, "exif_transpose", fails)
    with pytest.raises(BadMedia):
        decode(ref)


def test_another_image_of_the_same_time_is_another_image(tmp_path: Path) -> None:
    """Archives may give all files one time."""
    file, when = tmp_path / "a.png", 1_700_000_000
    for colour in ("red", "blue"):
        Image.new("RGB", (56, 56) if colour == "red" else (57, 56), colour).save(file)
        os.utime(file, (when, when))
        if colour == "red":
            before = refer(str(file), tmp_path)
    assert not before.is_unchanged()
    assert refer(str(file), tmp_path).is_unchanged()
