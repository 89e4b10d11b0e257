"""Mutated images and sounds: each is read, or refused as one that cannot be used."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
from hostile_media import image, mutated, sound, wav

from halftune.data.media.audio import _decoded
from halftune.data.media.reference import _LARGEST, BadMedia, decode, refer
from halftune.data.media.sound import MOST_SAMPLES

PER_FORMAT = 60


@pytest.mark.parametrize(
    "form", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "WAV", "WAV without packages", "FLAC", "OGG", "MP3"]
)
def test_a_mutated_file_is_read_or_refused(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "WAV without packages":
        monkeypatch.setattr("halftune.data.media.sound.find_spec", lambda _: None)
    kind = "audio" if form[:3] in ("WAV", "FLA", "OGG", "MP3") else "image"
    content, read = (sound(form.split()[0], 0.05) if kind == "audio" else image(form)), 0
    for seed in range(PER_FORMAT):
        (tmp_path / "a.bin").write_bytes(mutated(content, seed))
        found = size_of(tmp_path / "a.bin", kind)
        read += found is not None
    assert read < PER_FORMAT


def size_of(file: Path, kind: str) -> tuple[int, ...] | None:
    """The size of what is decoded, which must be that of the header; None if the file is refused."""
    try:
        ref = refer(file.name, file.parent, kind)
        found = decode(ref).size if kind == "image" else _decoded(ref, ref.rate).shape
    except BadMedia:
        return None
    assert found == ((ref.width, ref.height) if kind == "image" else (ref.frames,))
    return found


_ALL = (1 << 32) - 1
LYING = {
    "hours": wav(frames=16_000 * 36_000),
    "most": wav(frames=_ALL // 2),
    "none": wav(frames=0),
    "no channel": wav(channels=0),
    "channels": wav(channels=60_000),
    "no rate": wav(rate=0),
    "rate": wav(rate=_ALL),
    "no bits": wav(bits=0),
    "bits": wav(bits=0xFFF8),
    "only the beginning": b"RIFF",
    "nothing": b"",
}


@pytest.mark.parametrize("packages", [True, False])
@pytest.mark.parametrize("name", LYING)
def test_a_header_that_lies_takes_no_memory(
    name: str, packages: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packages:
        monkeypatch.setattr("halftune.data.media.sound.find_spec", lambda _: None)
    (tmp_path / "a.wav").write_bytes(LYING[name])
    tracemalloc.start()
    found, (_, most) = size_of(tmp_path / "a.wav", "audio"), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found in (None, (8000,))  # libsndfile believes the file's length instead
    assert most < _LARGEST + (1 << 20)  # the buffer of a file


def test_a_flac_header_that_claims_hours_is_refused(tmp_path: Path) -> None:
    content = bytearray(sound("FLAC"))
    content[21] |= 0x0F  # the number of samples, 36 bits, in STREAMINFO
    content[22:26] = b"\xff" * 4
    (tmp_path / "a.flac").write_bytes(content)
    assert MOST_SAMPLES < (1 << 36) - 1
    with pytest.raises(BadMedia):
        refer("a.flac", tmp_path, "audio")


@pytest.mark.parametrize(("content", "kind"), [(sound(), "image"), (image("PNG"), "audio"), (b"{}", "image")])
def test_what_a_file_holds_counts_and_not_its_name(content: bytes, kind: str, tmp_path: Path) -> None:
    for name in ("a.png", "a.wav"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadMedia):
            refer(name, tmp_path, kind)
    (tmp_path / "b.txt").write_bytes(image("JPEG"))
    assert decode(refer("b.txt", tmp_path)).size == (16, 12)


def test_links_and_pipes_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.wav").write_bytes(sound())
    (tmp_path / "data" / "link.wav").symlink_to("../secret.wav")
    (tmp_path / "data" / "folder").symlink_to(tmp_path)
    (tmp_path / "data" / "loop.wav").symlink_to("loop.wav")
    os.mkfifo(tmp_path / "data" / "pipe.wav")
    names = (
        "link.wav",
        "folder/secret.wav",
        "loop.wav",
        "pipe.wav",
        "../secret.wav",
        str(tmp_path / "secret.wav"),
        ".",
    )
    for name in (*names, "/dev/zero", "file:///dev/stdin", f"file://{tmp_path}/secret.wav", "a\0.wav"):
        with pytest.raises(BadMedia):
            refer(name, tmp_path / "data", "audio")
