"""Describes the media of samples: size or length, tokens, and a small copy to look at or listen to."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import PreTrainedTokenizerBase

from halftune.data.media.frames import NotVideo, decoded
from halftune.data.media.processor import MediaProcessor, MediaSettings
from halftune.data.media.reference import BadMedia, MediaRef, decode, read_content, unpack
from halftune.data.media.sound import NotSound, encoded, samples
from halftune.data.store import Example

SIDE, SECONDS, FRAMES = 160, 10, 16  # of a copy: pixels, the beginning of a sound, frames of a video
MOST_COPIES = 8 << 20  # bytes of all copies


@dataclass(frozen=True)
class Medium:
    """An image, a video or a sound of a sample.

    Attributes:
        kind: ``image``, ``video`` or ``audio``.
        file: name of its file; empty if the row itself holds it.
        tokens: number of tokens that represent it, with those that its processor adds.
        width, height: of an image or a frame in the file, in pixels; else 0.
        seconds: length of a video or a sound; else 0.
        frames: of a video those that the model takes; else 0.
    """

    kind: str
    file: str
    tokens: int
    width: int
    height: int
    seconds: float
    frames: int = 0

    def __str__(self) -> str:
        size = f"{self.seconds:.2f} s" if self.kind == "audio" else f"{self.width} × {self.height} pixels"
        if self.kind == "video":
            size += f", {self.frames} frames of {self.seconds:.2f} s"
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
        video = self._processor.video
        frames = len(video.taken(ref)) if video is not None and ref.kind == "video" else 0
        size = (ref.width, ref.height, round(ref.seconds, 3), frames)
        return Medium(ref.kind, Path(ref.path).name, len(ids), *size)

    def _copy(self, ref: MediaRef) -> str:
        if self._left <= 0:
            return ""
        try:
            form, content = _COPIES[ref.kind][0], _COPIES[ref.kind][1](ref)
        except (BadMedia, NotSound, NotVideo):
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


def _moving(ref: MediaRef) -> bytes:
    """An animated GIF, which every browser plays."""
    numbers = range(0, ref.frames, -(-ref.frames // FRAMES))
    images = [Image.fromarray(one) for one in decoded(read_content(ref), numbers)]
    for image in images:
        image.thumbnail((SIDE, SIDE))
    first, stream, apart = images[0], io.BytesIO(), round(1000 * ref.seconds / len(images))
    first.save(stream, "GIF", save_all=True, append_images=images[1:], duration=max(20, apart), loop=0)
    return stream.getvalue()


_COPIES: dict[str, tuple[str, Callable[[MediaRef], bytes]]] = {
    "image": ("image/png", _thumbnail),
    "video": ("image/gif", _moving),
    "audio": ("audio/wav", _beginning),
}
