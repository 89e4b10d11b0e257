"""Lengths of sounds whose headers have none, or an estimate."""

from __future__ import annotations

import io

import numpy as np
import pytest

from halftune.data.media.sound import MOST_SAMPLES, NotSound, header, samples

soundfile = pytest.importorskip("soundfile")
RATE, SECONDS = 16_000, 2


def encoded(form: str) -> bytes:
    """A silence before noise: of an MP3, the first frame has fewer bits than the others."""
    stream, sound = io.BytesIO(), np.random.default_rng().uniform(-0.5, 0.5, RATE * SECONDS)
    sound[: RATE // 2] = 0
    soundfile.write(stream, sound, RATE, format=form)
    return stream.getvalue()


def without_total(mp3: bytes) -> bytes:
    """An MP3 file without its first frame of 288 bytes, which has the number of frames: as of a stream that was cut."""
    assert mp3[288] == mp3[0] == 0xFF
    return mp3[288:]


@pytest.mark.parametrize("tag", [b"", b"ID3\x04\0\0\0\0\x08\0" + bytes(1024)])
def test_an_mp3_without_a_total_has_the_length_of_its_samples(tag: bytes) -> None:
    content = without_total(encoded("MP3"))
    read = soundfile.read(io.BytesIO(content), dtype="float32")[0]
    assert soundfile.info(io.BytesIO(content)).frames > len(read)  # an estimate
    assert header(tag + content) == (len(read), RATE)
    assert np.array_equal(samples(tag + content, len(read), RATE, RATE), read)


def test_an_mp3_with_a_total_is_as_it_was_encoded() -> None:
    content = encoded("MP3")
    assert header(content) == (RATE * SECONDS, RATE)
    with pytest.raises(NotSound):  # damaged: not counted anew
        samples(content[: len(content) // 2], *header(content[: len(content) // 2]), RATE)


def test_a_flac_without_a_total_is_not_called_too_long() -> None:
    content = bytearray(encoded("FLAC"))
    content[21] &= 0xF0  # the number of samples, 36 bits, in STREAMINFO
    content[22:26] = bytes(4)
    with pytest.raises(NotSound) as error:
        header(bytes(content))
    assert f"{MOST_SAMPLES:,}" not in str(error.value)
