"""How many tokens stand for a sound, by its length alone: what processors count on features, one rule each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _frames(extractor: Any, length: int, padded: int) -> int:
    """Frames of ``length`` samples that are not masked after padding to ``padded`` samples (Whisper's extractor)."""
    return min(-(-length // extractor.hop_length), padded // extractor.hop_length)


def _convolved(extractor: Any, length: int) -> int:
    """Frames of a sound in windows of the extractor's full length, after a convolution of stride 2."""
    whole, rest = divmod(length, extractor.n_samples)
    return (whole * extractor.nb_max_frames + _frames(extractor, rest, extractor.n_samples) - 1) // 2 + 1


def _pooled(extractor: Any, length: int, _: int) -> int:
    """A convolution, then an average of two (Whisper's encoder in Qwen2-Audio, Qwen2.5-Omni, Audio Flamingo 3)."""
    return (_convolved(extractor, length) - 2) // 2 + 1


def _merged(extractor: Any, length: int, _: int) -> int:
    """A convolution, then four in one (GLM-ASR)."""
    return _convolved(extractor, length) // 4


def _whole(extractor: Any, length: int, _: int) -> int:
    """A convolution, then four in one, of a sound that is padded to windows of the extractor's full length (Voxtral).

    375 tokens for 30 s: ``AudioEncoder._encode_audio_tokens`` in tokens/tokenizers/audio.py of mistral-common.
    """
    if extractor.n_samples % (8 * extractor.hop_length):
        raise ValueError(f"a window of {extractor.n_samples:,} samples is not a whole number of tokens")
    windows = -(-length // extractor.n_samples)
    return windows * extractor.nb_max_frames // 8


def _chunks(extractor: Any, length: int, longest: int) -> int:
    """Three convolutions in chunks of 100 frames, which give 13 tokens (Qwen3-Omni, Qwen3-ASR).

    The extractor pads to the longest sound of the row, and drops its last incomplete frame.
    """
    least = getattr(extractor, "min_length", 0)
    chunks, rest = divmod(_frames(extractor, max(length, least), max(longest, least)), 100)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return 13 * chunks + rest


def _strided(extractor: Any, length: int, _: int) -> int:
    """Two convolutions of stride 2 over frames whose samples are all real (Gemma 4)."""
    frames = -(-(length - (extractor.frame_length + 1) // 2) // extractor.hop_length)
    return max(0, -(-frames // 4))


def _raw(extractor: Any, length: int, _: int) -> int:
    """Samples as they are (Gemma 4 without an encoder)."""
    return -(-length // extractor.audio_samples_per_token)


# Arguments: the feature extractor, samples of the sound and of the longest of its row.
RULES: dict[str, Callable[[Any, int, int], int]] = {
    "pooled": _pooled, "merged": _merged, "whole": _whole, "chunks": _chunks, "strided": _strided, "raw": _raw,
}  # fmt: skip
