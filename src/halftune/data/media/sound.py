"""Sounds of rows: length and rate from the header, samples on demand.

soundfile reads WAV, FLAC, MP3 and OGG. Without it, Python's own ``wave`` reads WAV files of integers.
"""

from __future__ import annotations

import io
import wave
from importlib.util import find_spec
from typing import Any

import numpy as np

from halftune.core.optional import need

FORMATS = ("WAV", "WAVEX", "FLAC", "MP3", "OGG")  # what libsndfile may read: fewer decoders that read foreign files
MOST_CHANNELS, MOST_HERTZ = 16, 400_000
MOST_SAMPLES = 1 << 27  # of all channels, in fp32 half a GiB: a reader takes memory for what the header claims
_PIECE = 1 << 16  # samples decoded at a time
_UNKNOWN = (1 << 63) - 1  # libsndfile's length of a file whose header has none
_TOTALS = (b"Xing", b"Info", b"VBRI")  # frames of an MP3 file with its length; without, libsndfile estimates


class NotSound(Exception):
    """The bytes are no sound that can be read; ``args[0]`` says why."""


def header(encoded: bytes) -> tuple[int, int]:
    """Samples of each channel, and samples per second.

    Raises:
        NotSound: not a sound, empty, or with too many channels or samples.
    """
    frames, rate, channels = _with_soundfile(encoded) if find_spec("soundfile") else _with_wave(encoded)
    if frames < 1 or rate < 1 or channels < 1:
        raise NotSound("no samples")
    if channels > MOST_CHANNELS or rate > MOST_HERTZ:
        raise NotSound(f"{channels} channels at {rate:,} Hz; at most {MOST_CHANNELS} at {MOST_HERTZ:,}")
    if frames * channels > MOST_SAMPLES:
        raise NotSound(f"{frames * channels:,} samples; at most {MOST_SAMPLES:,}")
    return frames, rate


def _with_soundfile(encoded: bytes) -> tuple[int, int, int]:
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(encoded)) as file:
            if file.format not in FORMATS:
                raise NotSound(f"{file.format} files are not read")
            if file.frames == _UNKNOWN:  # soundfile cannot read it to its end
                raise NotSound("its header has no length, as of a FLAC file written to a pipe; encode it to a file")
            exact = file.format != "MP3" or _has_length(encoded)
            return file.frames if exact else _counted(file), file.samplerate, file.channels
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError, OSError) as error:
        raise NotSound("not a sound, or damaged") from error


def _has_length(encoded: bytes) -> bool:
    """Whether the first frame of an MP3 file, behind an ID3 tag, says how many there are."""
    tag = 0
    if encoded[:3] == b"ID3":
        for byte in encoded[6:10]:  # seven bits each
            tag = tag << 7 | byte & 0x7F
        tag += 10
    return any(name in encoded[tag : tag + 256] for name in _TOTALS)


def _counted(file: Any) -> int:
    """Samples of each channel, decoded in pieces; more than ``MOST_SAMPLES`` are not counted."""
    count, most = 0, MOST_SAMPLES // file.channels
    while count <= most and (read := len(file.read(_PIECE, always_2d=True))):
        count += read
    return count


def _with_wave(encoded: bytes) -> tuple[int, int, int]:
    try:
        with wave.open(io.BytesIO(encoded)) as file:
            if file.getsampwidth() > 4:
                raise NotSound(f"samples of {8 * file.getsampwidth()} bits are not read")
            return file.getnframes(), file.getframerate(), file.getnchannels()
    except (wave.Error, EOFError, ValueError, OSError, RuntimeError) as error:
        what = "not a WAV file of integers (pip install soundfile reads FLAC, MP3 and OGG)"
        raise NotSound(what if encoded[:4] != b"RIFF" else "damaged") from error


def samples(encoded: bytes, frames: int, rate: int, wanted: int) -> np.ndarray:
    """The mean of all channels, float32 ``[ceil(frames · wanted / rate)]``, between -1 and 1.

    Args:
        encoded: the file.
        frames, rate: as ``header`` gave them.
        wanted: samples per second of the result.

    Raises:
        NotSound: the file is damaged behind its header.
        MissingPackageError: another rate than the wanted one, without soxr.
    """
    read = _read_soundfile(encoded, frames) if find_spec("soundfile") else _read_wave(encoded)
    if len(read) != frames:
        raise NotSound(f"its header gives {frames:,} samples, the file has {len(read):,}")
    if not np.isfinite(read).all():
        raise NotSound("samples are not finite")
    mono = read.mean(axis=1, dtype=np.float32)
    if rate == wanted:
        return mono
    soxr = need("soxr", why=f"audio of {rate:,} Hz for a model of {wanted:,} Hz")
    made, length = soxr.resample(mono, rate, wanted), resampled(frames, rate, wanted)
    return np.pad(made[:length], (0, max(0, length - len(made))))


def encoded(sound: np.ndarray, rate: int) -> bytes:
    """A WAV file of 8 bits, of one channel between -1 and 1."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(rate)
        file.writeframes((127 * sound.clip(-1, 1) + 128).astype(np.uint8).tobytes())
    return stream.getvalue()


def resampled(frames: int, rate: int, wanted: int) -> int:
    """The length of a sound at another rate."""
    return -(-frames * wanted // rate)


def _read_soundfile(encoded: bytes, frames: int) -> np.ndarray:
    import soundfile

    try:
        return soundfile.read(io.BytesIO(encoded), frames=frames + 1, dtype="float32", always_2d=True)[0]
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError, OSError) as error:
        raise NotSound("damaged") from error


def _read_wave(encoded: bytes) -> np.ndarray:
    try:
        with wave.open(io.BytesIO(encoded)) as file:
            width, channels = file.getsampwidth(), file.getnchannels()
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError, ValueError, OSError, RuntimeError) as error:
        raise NotSound("damaged") from error
    raw = raw[: len(raw) // (width * channels) * width * channels]
    if width == 1:
        whole = np.frombuffer(raw, np.uint8).astype(np.float32) - 128
    else:  # little-endian, as the high bytes of 32 bits
        padded = np.zeros((len(raw) // width, 4), np.uint8)
        padded[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
        whole = padded.view("<i4")[:, 0].astype(np.float32) / 2 ** (8 * (4 - width))
    return whole.reshape(-1, channels) / 2 ** (8 * width - 1)
