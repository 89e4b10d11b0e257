"""Writes hostile media: mutated files of each format, headers that lie, wrong names, links and pipes."""

from __future__ import annotations

import io
import os
import struct
import wave
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

_ALL = (1 << 32) - 1


def image(form: str, width: int = 16, height: int = 12) -> bytes:
    """A picture of random pixels."""
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(255, size=(height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, form)
    return stream.getvalue()


def sound(form: str = "WAV", seconds: float = 0.5) -> bytes:
    """Noise of one channel at 16 kHz."""
    values = np.random.default_rng(0).integers(-999, 999, int(seconds * 16_000), dtype=np.int16)
    stream = io.BytesIO()
    if form != "WAV":
        import soundfile

        soundfile.write(stream, values, 16_000, format=form)
        return stream.getvalue()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(values.tobytes())
    return stream.getvalue()


def mutated(content: bytes, seed: int) -> bytes:
    """A few bytes changed, most near the beginning, or the end cut off, or a piece twice."""
    chance, made = np.random.default_rng(seed), bytearray(content)
    for _ in range(chance.integers(1, 6)):
        made[int(len(made) * chance.random() ** 4)] = chance.integers(256)
    if seed % 3 == 0:
        made = made[: chance.integers(len(made))]
    if seed % 5 == 0:
        place = chance.integers(len(made) + 1)
        made[place:place] = made[:place][-64:]
    return bytes(made)


def wav(*, frames: int = 800, rate: int = 16_000, channels: int = 1, bits: int = 16) -> bytes:
    """A WAV file of 8,000 samples whose header says what is given."""
    width = channels * bits // 8
    form = struct.pack("<IHHIIHH", 16, 1, channels, rate, rate * width & _ALL, width & 0xFFFF, bits)
    head = b"RIFF" + struct.pack("<I", frames * width + 36 & _ALL) + b"WAVEfmt " + form
    return head + b"data" + struct.pack("<I", frames * width & _ALL) + sound()[44:]


def png(width: int, height: int) -> bytes:
    """A PNG file of a few pixels whose header says what is given."""
    made = image("PNG")
    head = b"IHDR" + struct.pack(">II", width, height) + made[24:29]
    return made[:12] + head + struct.pack(">I", zlib.crc32(head)) + made[33:]


def _audio_formats() -> dict[str, Callable[[], bytes]]:
    packed = ("FLAC", "OGG", "MP3") if find_spec("soundfile") else ()
    return {"wav": sound, **{form.lower(): lambda form=form: sound(form) for form in packed}}


# kind → ending → a sound file of that format; kind → files that no mutation needs
FORMATS: dict[str, dict[str, Callable[[], bytes]]] = {
    "image": {form.lower(): lambda form=form: image(form) for form in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")},
    "audio": _audio_formats(),
}
LIES: dict[str, dict[str, bytes]] = {
    "image": {
        "huge.png": png(60_000, 60_000),
        "thin.png": png(1 << 30, 1),
        "flat.png": png(0, 12),
        "half.png": png(16, 6_000),
        "bomb.bmp": b"BM" + struct.pack("<IIIIiiHHIIiiII", 64, 0, 54, 40, 30_000, 30_000, 1, 24, 0, 0, 0, 0, 0, 0),
        "a sound.png": sound(),
        "text.png": b"{}",
        "empty.png": b"",
    },
    "audio": {
        "ten hours.wav": wav(frames=16_000 * 36_000),
        "most.wav": wav(frames=_ALL // 2),
        "no samples.wav": wav(frames=0),
        "no rate.wav": wav(rate=0),
        "channels.wav": wav(channels=60_000),
        "bits.wav": wav(bits=0xFFF8),
        "a picture.wav": image("PNG"),
        "text.wav": b"{}",
        "empty.wav": b"",
    },
}


def write_hostile(folder: Path, kind: str, many: int) -> list[str]:
    """Writes hostile files of a kind into a folder; their names, as a row may give them.

    First those that lie about what they are, links out of the folder and a pipe, then mutated files of each format.
    """
    folder.mkdir(parents=True)
    good, ending = next((make(), ending) for ending, make in FORMATS[kind].items())
    (folder.parent / f"outside.{ending}").write_bytes(good)
    (folder / f"link.{ending}").symlink_to(f"../outside.{ending}")
    (folder / f"loop.{ending}").symlink_to(f"loop.{ending}")
    os.mkfifo(folder / f"pipe.{ending}")
    for name, content in LIES[kind].items():
        (folder / name).write_bytes(content)
    paths = [f"link.{ending}", f"loop.{ending}", f"pipe.{ending}", f"../outside.{ending}", ".", "a\0b", "/dev/zero"]
    names = [*paths, *LIES[kind]]
    for seed in range(many - len(names)):
        ending, make = list(FORMATS[kind].items())[seed % len(FORMATS[kind])]
        (folder / f"{seed}.{ending}").write_bytes(mutated(make(), seed))
        names.append(f"{seed}.{ending}")
    return names
