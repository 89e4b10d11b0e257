"""Markers and columns of media in rows: each file is used once, or the row is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halftune.config.prompts import PROMPTS
from halftune.data.formats import messages, preference
from halftune.data.formats.conversation import Format, RowDropped, RowError
from halftune.data.formats.detect import Reading
from halftune.data.formats.prompted import prompted
from halftune.data.media.rows import read_row

KINDS = ("image", "audio")


def read(row: dict[str, Any], form: Format = messages.FORMAT, on_bad: str = "error") -> Any:
    return read_row(Reading(form, {}, (), (), {}), row, KINDS, on_bad)


def row(asked: Any, answer: str = "A cat.", **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], **columns}


BLIND = {
    "no column": row("<image>What?"),
    "null": row("<image>What?", images=None),
    "empty": row("<image>What?", images=[]),
    "of another kind": row("<audio><image>What?", images=["a.png"]),
    "no value": row([{"type": "image"}]),
    "in an answer": row("What?", "Write <image>."),
}


@pytest.mark.parametrize("name", BLIND)
def test_a_marker_without_a_file_is_an_error_or_drops_the_row(name: str) -> None:
    with pytest.raises(RowError) as error:
        read(BLIND[name])
    assert error.value.code == "data.image_count"
    with pytest.raises(RowDropped):
        read(BLIND[name], on_bad="drop")


@pytest.mark.parametrize("on_bad", ["error", "drop"])
def test_text_and_markers_of_kinds_that_are_not_trained_stay(on_bad: str) -> None:
    asked = "Which tag, <img> or <video>?"
    made = read(row(asked, images=[]), on_bad=on_bad)
    assert (made.messages[0]["content"], made.media) == (asked, ())


def test_a_marker_in_a_pair_or_without_a_chat_template_needs_a_file() -> None:
    with pytest.raises(RowError) as error:
        read({"prompt": "<image>?", "chosen": "A.", "rejected": "B."}, preference.FORMAT)
    assert error.value.code == "data.image_count"
    form = prompted(next(iter(PROMPTS)))
    assert read({"instruction": "What?", "output": "A."}, form).answer == "A."
    with pytest.raises(RowError) as error:
        read({"instruction": "<image>?", "output": "A."}, form)
    assert error.value.code == "data.media_unsupported"


def test_an_empty_column_is_absent_and_two_filled_ones_are_an_error() -> None:
    for empty in ([], None, ""):
        assert read(row("<image>What?", images=empty, image="r.png")).media == (("image", "r.png"),)
    with pytest.raises(RowError) as error:
        read(row("<image>What?", images=["r.png"], image="g.png"))
    assert error.value.code == "data.malformed_row"
    assert all(name in error.value.what.split() for name in ("images", "image"))


@pytest.mark.parametrize("key", ["text", "caption", "file", "url"])
def test_a_text_in_a_part_of_a_medium_is_refused(key: str) -> None:
    part = {"type": "image", "image": "r.png", "detail": "high", "max_pixels": 7}
    assert read(row([part])).media == (("image", "r.png"),)
    with pytest.raises(RowError) as error:
        read(row([{**part, key: "x"}]))
    assert error.value.code == "data.malformed_row"


def indexed(*indexes: int) -> list[dict[str, Any]]:
    return [{"type": "image", "text": None, "index": index} for index in indexes]


@pytest.mark.parametrize("form", [messages.FORMAT, preference.FORMAT])
@pytest.mark.parametrize("as_text", [False, True])
def test_the_index_of_a_part_names_its_file(form: Format, as_text: bool) -> None:
    asked = [{"role": "user", "content": indexed(1, 0, 1)}]
    more = [[*asked, {"role": "assistant", "content": one}] for one in ("A cat.", "A dog.")]
    given = {"messages": more[0]} if form is messages.FORMAT else {"chosen": more[0], "rejected": more[1]}
    given = {name: json.dumps(value) for name, value in given.items()} if as_text else given
    made = read({**given, "images": ["a.png", "b.png"]}, form)
    conversation = made if form is messages.FORMAT else made.rejected
    assert conversation.media == (("image", "b.png"), ("image", "a.png"), ("image", "b.png"))


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        (indexed(0, 0), "data.image_count"),
        (indexed(0, 2), "data.image_count"),
        ([*indexed(0), {"type": "image"}], "data.image_count"),
        (indexed(-1, 0), "data.malformed_row"),
    ],
)
def test_indexes_that_are_not_those_of_the_files_are_refused(parts: list[Any], code: str) -> None:
    with pytest.raises(RowError) as error:
        read(row(parts, images=["a.png", "b.png"]))
    assert error.value.code == code


@pytest.mark.parametrize(
    "more", [{"image_url": {"url": "b.png"}}, {"ocr": ["LOST"]}, {"source": {"type": "base64", "data": "AA"}}]
)
def test_what_is_left_of_a_part_of_a_medium_is_refused(more: dict[str, Any]) -> None:
    for part, columns in (({"image": "a.png"}, {}), ({}, {"images": ["a.png"]})):
        if "image_url" not in more or part:
            with pytest.raises(RowError) as error:
                read(row([{"type": "image", **part, **more}], **columns))
            assert error.value.code == "data.malformed_row"
