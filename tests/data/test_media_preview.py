"""Samples with images and sounds as they are shown: sizes, lengths, tokens, copies."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_audio
from PIL import Image
from tiny_images import write_image

from halftune.cli import main
from halftune.data.media import preview
from halftune.data.media.sound import header

AUDIO, IMAGE = "<|audio|>", "<|image_pad|>"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tiny_audio.audio_model(tmp_path / "model", "qwen2_5_omni_thinker")
    write_image(tmp_path / "a.png", 200, 100)
    row = {**tiny_audio.heard("<audio>Is it <image>?", "0.9.wav"), "images": ["a.png"]}
    path = tiny_audio.write_rows(tmp_path, [row, {**tiny_audio.ROWS[2], "images": []}])
    tree = {
        "model": {"name_or_path": str(tmp_path / "model")},
        "data": {"train": str(path), "audio": True, "images": True},
        "training": {"output_dir": str(tmp_path / "run")},
    }
    (tmp_path / "x.yaml").write_text(json.dumps(tree))
    return tmp_path / "x.yaml"


def asked(recipe: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(["data", "--config", str(recipe), *words])
    return capsys.readouterr().out


def test_media_of_a_sample_are_described(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heard, plain = json.loads(asked(recipe, capsys, "--json"))["samples"]
    assert plain["media"] == []
    audio, image = heard["media"]
    counts = {one["text"]: one["count"] for segment in heard["segments"] for one in segment}
    assert (audio["kind"], audio["file"], audio["seconds"]) == ("audio", "0.9.wav", 0.9)
    assert (image["kind"], image["file"], image["width"], image["height"]) == ("image", "a.png", 200, 100)
    assert (audio["tokens"], image["tokens"]) == (counts[AUDIO], counts[IMAGE])
    assert audio["tokens"] == 22  # 90 frames, halved twice
    assert Image.open(content(image)).size == (160, 80)
    assert header(content(audio).getvalue()) == (int(0.9 * 16_000), 16_000)


def content(medium: dict[str, Any]) -> io.BytesIO:
    return io.BytesIO(base64.b64decode(medium["preview"].partition(",")[2]))


def test_copies_are_limited_and_need_the_file(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(recipe, capsys)
    monkeypatch.setattr(preview, "MOST_COPIES", 1)
    copies = [bool(one["preview"]) for one in json.loads(asked(recipe, capsys, "--json"))["samples"][0]["media"]]
    assert copies == [True, False]


def test_a_terminal_shows_placeholders_once(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(recipe, capsys)
    assert (said.count(AUDIO), said.count(IMAGE)) == (1, 1)
    assert "0.9.wav" in said
