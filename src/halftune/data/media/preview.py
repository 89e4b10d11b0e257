"""Describes the images and sounds of samples: size or length, tokens, and a small copy to look at or listen to."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from halftune.data.media.processor import MediaProcessor, MediaSettings
from halftune.data.media.reference import BadMedia, MediaRef, decode, read_content, unpack
from halftune.data.media.sound import NotSound, encoded, samples
from halftune.data.store import Example

SIDE, SECONDS = 160, 10  # of a copy: pixels, and the beginning of a sound
MOST_COPIES = 8 << 20  # bytes of all copies


@dataclass(frozen=True)
class Medium:
    """An image or a sound of a sample.

    Attributes:
        kind: ``image`` or ``audio``.
        file: name of its file; empty if the row itself holds it.
        tokens: number of tokens that represent it, with those that its processor adds.
        width, height: of an image in the file, in pixels; else 0.
        seconds: length of a sound; else 0.
    """

    kind: str
    file: str
    tokens: int
    width: int
    height: int
    seconds: float

    def __str__(self) -> str:
        size = f"{self.seconds:.2f} s" if self.kind == "audio" else f"{self.width} × {self.height} pixels"
        return f"{self.kind} {self.file}".strip() + f": {size}, {self.tokens:,} tokens"


class MediaPreview:
    """Describes the media of samples.

    Args:
        settings: as the samples were tokenised.
        tokenizer: the samples' tokenizer.
    """

    def __init__(self, settings: MediaSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._processor, self._tokenizer = MediaProcessor(settings, tokenizer), tokenizer
        self._left = MOST_COPIES

    def of(self, example: Example) -> list[Medium]:
        """The media of a sample, in order."""
        return [self._described(ref) for ref in _refs(example)]

    def as_data(self, media: Example | Sequence[MediaRef]) -> list[dict[str, Any]]:
        """The media of a sample as JSON data, each with ``preview``, a data URL.

        ``preview`` is empty for a file that cannot be read any more, and after ``MOST_COPIES`` bytes.
        """
        refs = _refs(media) if isinstance(media, Example) else media
        return [{**asdict(self._described(ref)), "preview": self._copy(ref)} for ref in refs]

    def _described(self, ref: MediaRef) -> Medium:
        ids = self._tokenizer(self._processor.texts([ref])[0], add_special_tokens=False)["input_ids"]
        seconds = ref.frames / ref.rate if ref.is_audio else 0.0
        kind = "audio" if ref.is_audio else "image"
        return Medium(kind, Path(ref.path).name, len(ids), ref.width, ref.height, round(seconds, 3))

    def _copy(self, ref: MediaRef) -> str:
        if self._left <= 0:
            return ""
        try:
            form, content = ("audio/wav", _beginning(ref)) if ref.is_audio else ("image/png", _thumbnail(ref))
        except (BadMedia, NotSound):
            return ""
        self._left -= len(content)
        return f"data:{form};base64,{base64.b64encode(content).decode()}"


def _refs(example: Example) -> Iterator[MediaRef]:
    for segment in example.segments:
        if segment.media:
            yield from unpack(segment.media)


def _thumbnail(ref: MediaRef) -> bytes:
    image, stream = decode(ref), io.BytesIO()
    image.thumbnail((SIDE, SIDE))
    image.save(stream, "PNG")
    return stream.getvalue()


def _beginning(ref: MediaRef) -> bytes:
    sound = samples(read_content(ref), ref.frames, ref.rate, ref.rate)  # not resampled
    return encoded(sound[: SECONDS * ref.rate], ref.rate)
