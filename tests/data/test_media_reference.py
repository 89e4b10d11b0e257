"""References of media files: links, and what a file or a text holds."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from halftune.data.formats import messages
from halftune.data.formats.detect import Reading
from halftune.data.media.reference import BadMedia, decode, refer
from halftune.data.media.rows import read_row

WHEN = 1_700_000_000  # archives may give all files one time


def write(file: Path, colour: str = "red") -> Path:
    """A BMP, which has the same size in all colours."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (32, 24), colour).save(file, "BMP")
    os.utime(file, (WHEN, WHEN))
    return file


def link(path: Path, target: str | Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return path


def test_a_reference_has_the_path_of_its_row_and_sees_another_target(tmp_path: Path) -> None:
    file, _ = write(tmp_path / "v1" / "a.bmp"), write(tmp_path / "v2" / "a.bmp", "blue")
    link(tmp_path / "current", "v1")
    link(tmp_path / "b.bmp", file)
    names = ("current/a.bmp", "b.bmp", "v1/a.bmp")
    refs = [refer(name, tmp_path) for name in names]
    assert [ref.path for ref in refs] == [str(tmp_path / name) for name in names]
    assert all(ref.is_unchanged() for ref in refs)
    link(tmp_path / "current", "v2")
    link(tmp_path / "b.bmp", "v2/a.bmp")
    assert [ref.is_unchanged() for ref in refs] == [False, False, True]


def test_links_of_a_hub_snapshot_lead_to_its_blobs_only(tmp_path: Path) -> None:
    cached = tmp_path / "datasets--owner--name"
    snapshot, blob = cached / "snapshots" / "c0ffee", write(cached / "blobs" / "1a2b")
    other, secret = write(tmp_path / "datasets--owner--other" / "blobs" / "1a2b"), write(tmp_path / "secret")
    assert link(snapshot / "images" / "x.bmp", "../../../blobs/1a2b").resolve() == blob
    assert decode(refer("images/x.bmp", snapshot)).size == (32, 24)
    assert decode(refer("x.bmp", snapshot / "images")).size == (32, 24)
    for target in (other, secret, "../../blobs/../../secret", cached / "snapshots" / "d1ce" / "y.bmp"):
        link(snapshot / "bad.bmp", target)
        with pytest.raises(BadMedia):
            refer("bad.bmp", snapshot)
    link(tmp_path / "datasets--owner--evil" / "blobs", tmp_path)
    evil = link(tmp_path / "datasets--owner--evil" / "snapshots" / "c0ffee" / "x.bmp", "../../blobs/secret")
    with pytest.raises(BadMedia):
        refer("x.bmp", evil.parent)
    unnamed = link(tmp_path / "unnamed" / "snapshots" / "c0ffee" / "x.bmp", write(tmp_path / "unnamed" / "blobs" / "1"))
    with pytest.raises(BadMedia):
        refer("x.bmp", unnamed.parent)


TEXTS = {
    "base64 part": lambda content: read_part({"type": "image", "base64": base64.b64encode(content).decode()}),
    "bare base64": lambda content: base64.b64encode(content).decode(),
    "lines": lambda content: base64.encodebytes(content).decode(),
    "data URL of lines": lambda content: f"data:image/bmp;base64,{base64.encodebytes(content).decode()}",
    "capitals": lambda content: f"DATA:image/bmp;BASE64,{base64.b64encode(content).decode()}",
}


def read_part(part: dict[str, str]) -> Any:
    """The value that a content part has as a row is read."""
    row = {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "A cat."}]}
    made: Any = read_row(Reading(messages.FORMAT, {}, (), (), {}), row, ("image",), "error")
    return made.media[0][1]


@pytest.mark.parametrize("name", TEXTS)
def test_texts_hold_the_image(tmp_path: Path, name: str) -> None:
    content = write(tmp_path / "a.bmp").read_bytes()
    ref = refer(TEXTS[name](content), tmp_path)
    assert (ref.content, ref.path) == (content, "")


def test_paths_stay_paths(tmp_path: Path) -> None:
    file = write(tmp_path / ("0123456789abcdef" * 8) / "7")  # as base64 could be
    for given in (file.relative_to(tmp_path), file, f"file://{file}", f"file://localhost{file}"):
        assert refer(str(given), tmp_path).target == ""
        assert Path(refer(str(given), tmp_path).path) == file
    for given in (f"https://localhost{file}", f"file://elsewhere{file}"):
        with pytest.raises(BadMedia):
            refer(given, tmp_path)


@pytest.mark.parametrize("kind", ["TIFF", "JPEG", "PNG", "WEBP"])
def test_rotations_are_those_of_load_image(kind: str) -> None:
    """transformers' ``load_image`` opens, turns and converts."""
    for orientation in range(1, 9):
        exif, stream = Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        Image.effect_noise((45, 30), 60).convert("RGB").save(stream, kind, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(stream)).convert("RGB")
        ref = refer(stream.getvalue(), None)
        made = decode(ref)
        assert (ref.width, ref.height) == made.size == expected.size
        assert made.tobytes() == expected.tobytes()
