"""Finds the media of a row: content parts, and columns with ``<image>``, ``<video>`` or ``<audio>`` in the texts.

Each becomes a character of ``MEDIA`` in its text, until the chat template writes the model's own placeholder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from halftune.config.facts.media import DATA_KEYS
from halftune.data.formats import fields, turns
from halftune.data.formats.conversation import Conversation, Preference, Prompt, Rated, Record, RowDropped, RowError
from halftune.data.formats.detect import Reading
from halftune.data.templates.control_tokens import MEDIA, texts_of

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
_ABOUT = ("type", "id", "detail", "format", "mime_type", "media_type", "name", "filename")  # no text of training
_LISTS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")  # columns of messages
_FREE = ("tools", "system")  # texts of a row that hold no media
# While a format reads a row: a character of MEDIA, its number and an end. The number is that of a part's value, or "#"
# and the index in the column; a marker has none.
_END = "\U000fe00f"
_PLACE = re.compile(f"([{''.join(MEDIA)}])(#?[0-9]*){_END}")
_RESERVED = re.compile(f"[{''.join(MEDIA)}{_END}]")

Found = list[tuple[str, Any]]


def read_row(reading: Reading, row: Mapping[str, Any], kinds: tuple[str, ...], on_bad: str) -> Record:
    """The record of a row whose columns have the format's names. The media of a prompt belong to all its answers.

    Args:
        reading: the row's format.
        row: the row.
        kinds: what is trained: ``image``, ``video``, ``audio``.
        on_bad: ``error`` or ``drop``, as ``data.on_bad_media``.

    Raises:
        RowError: not one marker for each image, video and sound, one in an answer, or of another kind.
        RowDropped: as the format does; for a wrong number of markers with ``drop``.
    """
    try:
        return _record(reading, row, kinds)
    except RowError as error:
        if on_bad == "drop" and error.code == "data.image_count":
            raise RowDropped("another number of markers than of files, or one in an answer") from error
        raise


def _record(reading: Reading, row: Mapping[str, Any], kinds: tuple[str, ...]) -> Record:
    _check_columns(row, kinds)
    given = {kind: _column(row, kind) for kind in kinds}
    found: Found = []
    texts = {name: value for name, value in row.items() if name not in _COLUMNS}
    for name, value in texts.items():
        if name not in _FREE:
            value = turns.listed(value, name) if name in _LISTS else value
            texts[name] = _without_media(value, found, kinds)
        elif isinstance(value, str):
            texts[name] = _without_markers(value, ())
    made = reading.format.read(texts)
    if isinstance(made, Preference):
        chosen, rejected = (_with_media(one, found, given, shared=True) for one in (made.chosen, made.rejected))
        conversations, made = [chosen, rejected], replace(made, chosen=chosen, rejected=rejected)
    elif isinstance(made, Prompt | Rated):
        made = replace(made, conversation=_with_media(made.conversation, found, given, shared=isinstance(made, Rated)))
        conversations = [made.conversation]
    elif isinstance(made, Conversation):
        conversations = [made := _with_media(made, found, given)]
    elif any(given.values()) or _PLACE.search(texts_of(texts)):
        raise RowError(f"rows of format {reading.format.name} have no images", code="data.media_unsupported")
    else:
        return made
    if any(one not in conversation.media for one in found for conversation in conversations):
        raise _misplaced()
    return made


def _check_columns(row: Mapping[str, Any], kinds: tuple[str, ...]) -> None:
    for name, kind in _COLUMNS.items():
        if row.get(name) and kind not in kinds:
            raise _unsupported(name, kinds)


def _with_media(
    made: Conversation, found: Found, given: Mapping[str, Sequence[Any]], *, shared: bool = False
) -> Conversation:
    """The conversation with its media in the order of its texts.

    Args:
        made: as the format has read it.
        found: kinds and values of parts.
        given: values of the columns by kind.
        shared: other answers follow the same prompt: media stand before the first trained one.

    Raises:
        RowError: one of them is in an answer, or a column has not one value for each marker.
    """
    wishes = enumerate(zip(made.messages, made.train, strict=True))
    answers = [i for i, (one, wish) in wishes if one["role"] == "assistant" and wish is not False]
    last = answers[0] if shared and answers else len(made.messages)
    for index, one in enumerate(made.messages):
        asked = index < last and one["role"] != "assistant"
        if _PLACE.search(texts_of({**one, "content": ""} if asked else one)):
            raise _misplaced()
    messages = [{**one, "content": _PLACE.sub(r"\1", one["content"])} for one in made.messages]
    places = [(match[1], match[2]) for one in made.messages for match in _PLACE.finditer(one["content"])]
    return replace(made, messages=messages, media=tuple(_matched(places, found, given)))


def _misplaced() -> RowError:
    what = f"media, or one of {', '.join(MARKERS)}, in an answer or outside the messages"
    return RowError(what, "move it into a question; a text cannot contain the marker", "data.image_count")


def _unsupported(name: str, kinds: tuple[str, ...]) -> RowError:
    known = " and ".join(("text", *(DATA_KEYS[kind] for kind in kinds)))
    remedy = "set data.images, data.audio or data.videos, or remove the row"
    return RowError(f"row with {name}: this run trains {known}", remedy, "data.media_unsupported")


def _column(row: Mapping[str, Any], kind: str) -> list[Any]:
    names = [name for name, holds in _COLUMNS.items() if holds == kind and _listed(row.get(name))]
    if len(names) > 1:
        raise RowError(f"{kind}s in the columns {' and '.join(names)}", "keep one of these columns")
    return _listed(row[names[0]]) if names else []


def _listed(value: Any) -> list[Any]:
    """The values of a column: a list, or one value."""
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _without_media(value: Any, found: Found, kinds: tuple[str, ...]) -> Any:
    """A copy with a place for each medium; ``found`` gets kinds and values of parts, equal ones once."""
    if isinstance(value, str):
        return _without_markers(value, kinds)
    if isinstance(value, list | tuple):
        return [_without_media(item, found, kinds) for item in value]
    if not isinstance(value, Mapping):
        return value
    part = value.get("type")
    if isinstance(part, str) and part in _PARTS:
        medium = _medium(value, part, kinds)
        if medium[1] is not None and medium not in found:
            found.append(medium)
        number = _index(value) if medium[1] is None else found.index(medium)
        return {"type": "text", "text": f"{CHARACTERS[medium[0]]}{number}{_END}"}
    return {name: _without_media(item, found, kinds) for name, item in value.items()}


def _medium(value: Mapping[str, Any], part: str, kinds: tuple[str, ...]) -> tuple[str, Any]:
    """Kind and value of a content part; the value of a marker is None."""
    kind = _PARTS[part]
    if kind not in kinds:
        raise _unsupported(f"{part} parts", kinds)
    name = next((name for name in (part, *_VALUES) if value.get(name) is not None), None)
    texts = {key: text for key, text in value.items() if isinstance(text, str | list | tuple | Mapping)}
    fields.refuse_unread(texts, {str(name), *_ABOUT}, f"part of type {part}")
    if name == "base64":
        return kind, {name: value[name]}  # a text alone is a path
    return kind, None if name is None else value[name]


def _index(value: Mapping[str, Any]) -> str:
    """The number of a part without a value: "#" and its index in the column, or "" as a marker has."""
    index = value.get("index")
    if fields.is_missing(index):
        return ""
    if not isinstance(index, int) or index < 0:
        raise RowError(f"index of a part: expected an integer ≥ 0, got {index!r}")
    return f"#{index:d}"


def _without_markers(text: str, kinds: tuple[str, ...]) -> str:
    if _RESERVED.search(text):
        raise RowDropped("row with private-use characters (U+F5000 and above), which halftune reserves")
    for marker, kind in MARKERS.items():
        text = text.replace(marker, CHARACTERS[kind] + _END) if kind in kinds else text
    return text


def _matched(places: Sequence[tuple[str, str]], found: Found, given: Mapping[str, Sequence[Any]]) -> Found:
    """Values of parts; of the column, those with the index of a part, or for markers the next one.

    Raises:
        RowError: not as many of them as markers, or indexes that are not those of the column.
    """
    for kind, values in given.items():
        numbers = [number for character, number in places if MEDIA[character] == kind]
        markers, indexes = numbers.count(""), {int(number[1:]) for number in numbers if number.startswith("#")}
        if indexes and (markers or indexes != {*range(len(values))}):
            what = (
                f"{kind} parts with index {sorted(indexes)} and {markers} markers for {len(values)} files in the column"
            )
            raise RowError(what, "refer to each file by its index, from 0", "data.image_count")
        if not indexes and markers != len(values):
            what = f"{markers} markers (<{kind}>, or parts without a value) for {len(values)} files in the column"
            remedy = f"give one file for each <{kind}>; a text cannot contain <{kind}>"
            raise RowError(what, remedy, "data.image_count")
    waiting = {kind: iter(values) for kind, values in given.items()}

    def medium(kind: str, number: str) -> tuple[str, Any]:
        if number.startswith("#"):
            return kind, given[kind][int(number[1:])]
        return found[int(number)] if number else (kind, next(waiting[kind]))

    return [medium(MEDIA[character], number) for character, number in places]
