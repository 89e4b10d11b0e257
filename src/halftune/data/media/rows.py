"""Finds the images of a row: content parts, and an ``images`` column with ``<image>`` markers in the texts.

Each image becomes the character ``IMAGE`` in its text, until the chat template writes the model's own placeholder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from halftune.data.control_tokens import IMAGE
from halftune.data.conversation import Conversation, Record, RowDropped, RowError
from halftune.data.detect import Reading

MARKER = "<image>"
_COLUMNS = ("images", "image")
_OTHERS = ("audios", "audio", "videos", "video")
_PARTS, _OTHER_PARTS = ("image", "image_url"), ("audio", "input_audio", "audio_url", "video", "video_url")
_FREE = ("tools", "system")  # texts of a row that hold no images


def read_row(reading: Reading, row: Mapping[str, Any]) -> Record:
    """The record of a row whose columns have the format's names.

    Raises:
        RowError: as many markers as images are expected, and none in an answer; or there is audio or video.
        RowDropped: as the format does.
    """
    for name in _OTHERS:
        if row.get(name):
            raise RowError(f"row with {name}: only text and images are supported", code="data.media_unsupported")
    given = _listed(next((row[name] for name in _COLUMNS if row.get(name) is not None), None))
    found: list[Any] = []
    plain = {
        name: value if name in _FREE else _without_images(value, found, marked=bool(given))
        for name, value in row.items()
        if name not in _COLUMNS
    }
    made = reading.format.read(plain)
    if not isinstance(made, Conversation):
        if given or found:
            raise RowError(f"rows of format {reading.format.name} have no images", code="data.media_unsupported")
        return made
    images = _matched(found, given)
    texts = [str(message["content"]) for message in made.messages if message["role"] != "assistant"]
    if sum(text.count(IMAGE) for text in texts) != len(images):
        raise RowError("an image stands in an answer, or outside the messages", code="data.image_count")
    return replace(made, images=tuple(images))


def _listed(value: Any) -> list[Any]:
    """The images of a column: a list, or one image."""
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _without_images(value: Any, found: list[Any], *, marked: bool) -> Any:
    """A copy with ``IMAGE`` for each image; ``found`` gets its value, or None for a marker or a part without value."""
    if isinstance(value, str):
        if IMAGE in value:
            raise RowDropped("row with private-use characters (U+F5000 and above), which halftune reserves")
        if not marked:
            return value
        found += [None] * value.count(MARKER)
        return value.replace(MARKER, IMAGE)
    if isinstance(value, list | tuple):
        return [_without_images(item, found, marked=marked) for item in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get("type")
    if kind in _OTHER_PARTS:
        raise RowError(f"row with {kind} parts: only text and images are supported", code="data.media_unsupported")
    if kind in _PARTS:
        names = (kind, "image", "image_url", "path", "url", "bytes", "base64")
        found.append(next((value[name] for name in names if value.get(name) is not None), None))
        return {"type": "text", "text": IMAGE}
    return {name: _without_images(item, found, marked=marked) for name, item in value.items()}


def _matched(found: list[Any], given: list[Any]) -> list[Any]:
    """The images in the order of the texts: values of parts, and for markers the next of the column.

    Raises:
        RowError: not as many images as markers.
    """
    markers = sum(one is None for one in found)
    if markers != len(given):
        raise RowError(
            f"{markers} image markers ({MARKER}, or parts without an image) for {len(given)} images in the column",
            f"write one {MARKER} for each image",
            "data.image_count",
        )
    waiting = iter(given)
    return [next(waiting) if one is None else one for one in found]
