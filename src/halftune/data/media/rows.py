"""Finds the media of a row: content parts, and columns with ``<image>``, ``<video>`` or ``<audio>`` in the texts.

Each becomes a character of ``MEDIA`` in its text, until the chat template writes the model's own placeholder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from halftune.config.facts.media import DATA_KEYS
from halftune.data.formats.conversation import Conversation, Record, RowDropped, RowError
from halftune.data.formats.detect import Reading
from halftune.data.templates.control_tokens import MEDIA

CHARACTERS = {kind: character for character, kind in MEDIA.items()}
MARKERS = {"<image>": "image", "<video>": "video", "<audio>": "audio"}
_COLUMNS = {
    "images": "image", "image": "image", "videos": "video", "video": "video", "audios": "audio", "audio": "audio"
}  # fmt: skip
_PARTS = {
    "image": "image", "image_url": "image", "video": "video", "video_url": "video",
    "audio": "audio", "input_audio": "audio", "audio_url": "audio",
}  # fmt: skip
_VALUES = ("image", "image_url", "video", "video_url", "audio", "audio_url", "path", "url", "bytes", "base64")
_FREE = ("tools", "system")  # texts of a row that hold no media

Found = list[tuple[str, Any]]


def read_row(reading: Reading, row: Mapping[str, Any], kinds: tuple[str, ...]) -> Record:
    """The record of a row whose columns have the format's names.

    Args:
        reading: the row's format.
        row: the row.
        kinds: what is trained: ``image``, ``video``, ``audio``.

    Raises:
        RowError: not one marker for each image, video and sound, one in an answer, or of another kind.
        RowDropped: as the format does.
    """
    _check_columns(row, kinds)
    given = {kind: _column(row, kind) for kind in kinds}
    marked = frozenset(kind for kind, values in given.items() if values)
    found: Found = []
    texts = {name: value for name, value in row.items() if name not in _COLUMNS}
    for name, value in texts.items():
        if name not in _FREE:
            texts[name] = _without_media(value, found, marked, kinds)
    made = reading.format.read(texts)
    if isinstance(made, Conversation):
        return replace(made, media=_of_questions(made, _matched(found, given)))
    if marked or found:
        raise RowError(f"rows of format {reading.format.name} have no images", code="data.media_unsupported")
    return made


def _check_columns(row: Mapping[str, Any], kinds: tuple[str, ...]) -> None:
    for name, kind in _COLUMNS.items():
        if row.get(name) and kind not in kinds:
            raise _unsupported(name, kinds)


def _of_questions(made: Conversation, media: Found) -> tuple[tuple[str, Any], ...]:
    """The media of a conversation.

    Raises:
        RowError: one of them is in an answer, or outside the messages.
    """
    texts = [str(message["content"]) for message in made.messages if message["role"] != "assistant"]
    if sum(text.count(character) for text in texts for character in MEDIA) != len(media):
        raise RowError("media stand in an answer, or outside the messages", code="data.image_count")
    return tuple(media)


def _unsupported(name: str, kinds: tuple[str, ...]) -> RowError:
    known = " and ".join(("text", *(DATA_KEYS[kind] for kind in kinds)))
    return RowError(f"row with {name}: this run trains {known}", code="data.media_unsupported")


def _column(row: Mapping[str, Any], kind: str) -> list[Any]:
    names = [name for name, holds in _COLUMNS.items() if holds == kind]
    return _listed(next((row[name] for name in names if row.get(name) is not None), None))


def _listed(value: Any) -> list[Any]:
    """The values of a column: a list, or one value."""
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _without_media(value: Any, found: Found, marked: frozenset[str], kinds: tuple[str, ...]) -> Any:
    """A copy with a character for each medium; ``found`` gets its kind and value, which is None
    for a marker or a part without value."""
    if isinstance(value, str):
        return _without_markers(value, found, marked)
    if isinstance(value, list | tuple):
        return [_without_media(item, found, marked, kinds) for item in value]
    if not isinstance(value, Mapping):
        return value
    part = value.get("type")
    if part in _PARTS:
        found.append(_medium(value, str(part), kinds))
        return {"type": "text", "text": CHARACTERS[found[-1][0]]}
    return {name: _without_media(item, found, marked, kinds) for name, item in value.items()}


def _medium(value: Mapping[str, Any], part: str, kinds: tuple[str, ...]) -> tuple[str, Any]:
    """Kind and value of a content part."""
    kind = _PARTS[part]
    if kind not in kinds:
        raise _unsupported(f"{part} parts", kinds)
    return kind, next((value[name] for name in (part, *_VALUES) if value.get(name) is not None), None)


def _without_markers(text: str, found: Found, marked: frozenset[str]) -> str:
    if any(character in text for character in MEDIA):
        raise RowDropped("row with private-use characters (U+F5000 and above), which halftune reserves")
    known = [re.escape(marker) for marker, kind in MARKERS.items() if kind in marked]
    return re.sub("|".join(known), lambda match: _noted(match[0], found), text) if known else text


def _noted(marker: str, found: Found) -> str:
    found.append((MARKERS[marker], None))
    return CHARACTERS[MARKERS[marker]]


def _matched(found: Found, given: dict[str, list[Any]]) -> Found:
    """Media in the order of the texts: values of parts, and for markers the next of the column.

    Raises:
        RowError: not as many of them as markers.
    """
    for kind, values in given.items():
        markers = sum(value is None for holds, value in found if holds == kind)
        if markers != len(values):
            what = f"{markers} markers (<{kind}>, or parts without a value) for {len(values)} in the column"
            raise RowError(what, f"write one <{kind}> for each", "data.image_count")
    waiting = {kind: iter(values) for kind, values in given.items()}
    return [(kind, next(waiting[kind]) if value is None else value) for kind, value in found]
