"""Damaged, lying and mutated videos: each is read, or refused as one that cannot be used."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_video import write_video

from halftune.core.errors import MissingPackageError
from halftune.data.media.frames import MOST_PIXELS, NotVideo, decoded, examine
from halftune.data.media.reference import BadMedia, refer

PER_FORMAT = 40
FORMS = {  # container, codec
    "mp4": ("mp4", "mpeg4"),
    "h264": ("mp4", "libx264"),
    "webm": ("webm", "libvpx"),
    "vp9": ("webm", "libvpx-vp9"),
    "mkv": ("matroska", "libx264"),
    "mov": ("mov", "mpeg4"),
    "avi": ("avi", "mpeg4"),
}


def film(form: str, frames: int = 30, size: tuple[int, int] = (64, 48)) -> bytes:
    """A video of a bar that moves, 10 frames per second, a key frame every five."""
    av = pytest.importorskip("av")
    container, codec = FORMS[form]
    if codec not in av.codecs_available:
        pytest.skip(f"FFmpeg has no {codec}")
    stream = io.BytesIO()
    with av.open(stream, "w", format=container) as file:
        track = file.add_stream(codec, rate=10)
        track.width, track.height, track.pix_fmt, track.codec_context.gop_size = *size, "yuv420p", 5
        for number in range(frames):
            pixels = np.zeros((size[1], size[0], 3), np.uint8)
            pixels[:, number : number + 8] = 255
            pixels[:, :, 1] = 8 * number
            file.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(track.encode())
    return stream.getvalue()


@pytest.mark.parametrize("form", FORMS)
def test_frames_are_those_of_the_whole_decoded_film(form: str) -> None:
    content = film(form)
    av = pytest.importorskip("av")
    with av.open(io.BytesIO(content)) as file:
        whole = [one.to_ndarray(format="rgb24") for one in file.decode(video=0)]
    found = examine(content)
    assert (found.width, found.height, found.frames, found.fps) == (64, 48, len(whole), 10)
    for wanted in ([0], [29], [3, 4, 28], [0, 7, 19, 22], list(range(30))):
        assert all(np.array_equal(one, whole[at]) for one, at in zip(decoded(content, wanted), wanted, strict=True))


def test_a_gif_is_read_without_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    content = write_video(tmp_path / "a.gif", 9, (20, 10), fps=4).read_bytes()
    found = examine(content)
    assert (found.width, found.height, found.frames, found.fps) == (20, 10, 9, 4)
    with Image.open(tmp_path / "a.gif") as image:
        image.seek(7)
        assert np.array_equal(next(decoded(content, [7])), np.array(image.convert("RGB")))
    with pytest.raises(MissingPackageError):
        examine(b"RIFF")


def gif(pages: list[Image.Image], times: int | list[int]) -> bytes:
    """A GIF of pages, each shown for its time in ms."""
    stream = io.BytesIO()
    pages[0].save(stream, "GIF", save_all=True, append_images=pages[1:], duration=times)
    return stream.getvalue()


def test_a_gif_of_uneven_times_is_a_film_of_their_unit() -> None:
    shades = [0, 50, 100, 150]
    content = gif([Image.new("L", (8, 6), shade) for shade in shades], [100, 250, 50, 300])
    found = examine(content)
    assert (found.frames, found.fps) == (14, 20)
    shown = [0] * 2 + [50] * 5 + [100] + [150] * 6
    assert [int(one.max()) for one in decoded(content, range(14))] == shown
    assert [int(one.max()) for one in decoded(content, [1, 6, 7, 13])] == [0, 50, 100, 150]


def test_what_is_transparent_in_a_gif_is_white() -> None:
    pages = [Image.new("RGBA", (32, 16), (0, 0, 0, 0)) for _ in range(3)]
    for number, page in enumerate(pages):
        page.paste((255, 0, 0, 255), (8 * number, 0, 8 * number + 8, 8))
    frames = list(decoded(gif(pages, 100), range(3)))
    assert [one[12, 28].tolist() for one in frames] == [[255, 255, 255]] * 3
    assert [one[4, 8 * number + 4].tolist() for number, one in enumerate(frames)] == [[255, 0, 0]] * 3


def test_a_film_that_is_turned_is_seen_upright() -> None:
    av = pytest.importorskip("av")
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as file:
        track = file.add_stream("mpeg4", rate=10)
        track.width, track.height, track.pix_fmt = 64, 48, "yuv420p"
        track.set_display_rotation(90)
        pixels = np.zeros((48, 64, 3), np.uint8)
        pixels[:, :32] = 255  # the left half
        for _ in range(4):
            file.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(track.encode())
    found = examine(stream.getvalue())
    assert (found.width, found.height) == (48, 64)
    (frame,) = decoded(stream.getvalue(), [1])
    top, bottom = frame[:24].mean(), frame[-24:].mean()
    assert (top > 200) != (bottom > 200)  # halves above each other


def mutated(content: bytes, seed: int) -> bytes:
    chance, made = np.random.default_rng(seed), bytearray(content)
    for _ in range(chance.integers(1, 9)):
        made[int(len(made) * chance.random() ** 2)] = chance.integers(256)
    return bytes(made[: chance.integers(len(made))] if seed % 4 == 0 else made)


@pytest.mark.parametrize(
    "form", ["gif", "mp4", *(pytest.param(one, marks=pytest.mark.nightly) for one in FORMS if one != "mp4")]
)
def test_a_mutated_file_is_read_or_refused(form: str, tmp_path: Path) -> None:
    pytest.importorskip("av")
    content = write_video(tmp_path / "a.gif").read_bytes() if form == "gif" else film(form, 12)
    read = 0
    for seed in range(PER_FORMAT):
        (tmp_path / "a.bin").write_bytes(mutated(content, seed))
        try:
            ref = refer("a.bin", tmp_path, "video")
            frames = list(decoded((tmp_path / "a.bin").read_bytes(), sorted({0, ref.frames // 2, ref.frames - 1})))
        except (BadMedia, NotVideo):
            continue
        read += 1
        assert all(one.dtype == np.uint8 and one.ndim == 3 for one in frames)
    assert read < PER_FORMAT


def hours(content: bytes) -> bytes:
    """The film with a header that claims ten hours: Matroska's Duration, in milliseconds."""
    place = content.index(b"\x44\x89\x88") + 3
    return content[:place] + struct.pack(">d", 36_000_000) + content[place + 8 :]


def sound() -> bytes:
    av = pytest.importorskip("av")
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as file:
        track = file.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        file.mux(track.encode(frame))
        file.mux(track.encode())
    return stream.getvalue()


def huge() -> bytes:
    screen = struct.pack("<HHBBB", 60_000, 60_000, 0, 0, 0)
    return b"GIF89a" + screen + b"\x2c" + struct.pack("<HHHHB", 0, 0, 60_000, 60_000, 0) + b"\x02\x00\x3b"


LYING = {
    "hours": lambda: hours(film("mkv")),
    "cut": lambda: film("mp4")[:-400],
    "a third": lambda: film("webm")[: len(film("webm")) // 3],
    "sound only": sound,
    "huge": huge,
    "no frames": lambda: b"GIF89a" + bytes(7) + b"\x3b",
    "nothing": lambda: b"",
    "text": lambda: b"a wrong extension",
    "image": lambda: b"\x89PNG\r\n\x1a\n",
    "hls": lambda: b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nok.mp4\n#EXT-X-ENDLIST\n",
    "concat": lambda: b"ffconcat version 1.0\nfile ok.mp4\n",
}


@pytest.mark.parametrize("name", LYING)
def test_a_lying_file_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("av")
    (tmp_path / "ok.mp4").write_bytes(film("mp4"))
    (tmp_path / "a.mp4").write_bytes(LYING[name]())
    with pytest.raises(BadMedia):
        refer("a.mp4", tmp_path, "video")
    assert refer("ok.mp4", tmp_path, "video").frames == 30


def test_a_film_of_too_many_pixels_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = film("h264")
    monkeypatch.setattr("halftune.data.media.frames.MOST_PIXELS", 64 * 48 - 1)
    with pytest.raises(NotVideo):
        examine(content)
    assert MOST_PIXELS > 64 * 48


def test_links_and_addresses_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_video(tmp_path / "secret.gif")
    (tmp_path / "data" / "link.gif").symlink_to("../secret.gif")
    for name in ("link.gif", "../secret.gif", "https://example.org/a.mp4", "rtsp://example.org/a", "concat:a|b"):
        with pytest.raises(BadMedia):
            refer(name, tmp_path / "data", "video")
