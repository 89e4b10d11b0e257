"""Markers and columns of media in rows: each file is used once, or the row is refused."""

from __future__ import annotations

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
