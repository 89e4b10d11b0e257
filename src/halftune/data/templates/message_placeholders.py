"""Finds which message each character of a rendered conversation comes from.

The conversation is rendered a second time with every visible character of a message replaced by a placeholder: one
private-use character per message. Both renderings must agree outside message texts. The placeholders then show the
position of each text, even if the template moves, repeats or omits texts, and even if a text occurs several times.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from halftune.data.formats.conversation import RowDropped
from halftune.data.templates.control_tokens import BREAK, MEDIA
from halftune.data.templates.render import ChatTemplate

FIRST, NAMES = 0x100000, 0x108000  # the second private-use plane; control_tokens.py uses the first
PLACEHOLDER = re.compile("[\U00100000-\U0010ffff]")
# White space is trimmed by templates; quotes, backslashes and control characters are escaped by ``tojson``.
_VISIBLE = np.ones(sys.maxunicode + 1, dtype=bool)
_VISIBLE[
    [
        *range(0x21),
        *map(ord, '"\\\x7f'),
        ord(BREAK),
        *map(ord, MEDIA),
        *(code for code in range(0x3001) if chr(code).isspace()),
    ]
] = False
_TEXTS = ("content", "reasoning_content")

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TextSpan:
    """The text of one message in a rendering, in characters.

    Attributes:
        message: its index.
        start, end: from its first to after its last visible character, without text of another message between.
    """

    message: int
    start: int
    end: int


def with_placeholders(template: ChatTemplate, messages: Messages) -> list[dict[str, Any]]:
    """The messages with visible characters replaced by the placeholder of their message.

    Tags that the template may search for (``</think>``) stay. For a tool call without text the function name is
    replaced, by a second placeholder: templates repeat the name before the result.
    """
    return [_replace_texts(template, message, index) for index, message in enumerate(messages)]


def _replace_texts(template: ChatTemplate, message: Mapping[str, Any], index: int) -> dict[str, Any]:
    replace = partial(_replace, template, placeholder=chr(FIRST + index))
    changed = {**message, **{key: replace(message[key]) for key in _TEXTS if key in message}}
    calls = []
    for call in message.get("tool_calls") or ():
        function = {**call["function"], "arguments": replace(call["function"]["arguments"])}
        if chr(FIRST + index) not in json.dumps(function["arguments"], ensure_ascii=False):
            function["name"] = replace(function["name"], placeholder=chr(NAMES + index))
        calls.append({**call, "function": function})
    return {**changed, "tool_calls": calls} if calls else changed


def _replace(template: ChatTemplate, value: Any, *, placeholder: str) -> Any:
    """A value with the visible characters of its texts replaced, except tags of the template."""
    if isinstance(value, str):
        pieces = template.literals.split(value)
        pieces[::2] = [_replace_visible(piece, placeholder) for piece in pieces[::2]]
        return "".join(pieces)
    replace = partial(_replace, template, placeholder=placeholder)
    if isinstance(value, Mapping):
        return {key: replace(item) for key, item in value.items()}
    return [replace(item) for item in value] if isinstance(value, list | tuple) else value


def _replace_visible(text: str, placeholder: str) -> str:
    codes = _codes(text).copy()
    codes[_VISIBLE[codes]] = ord(placeholder)
    return codes.tobytes().decode("utf-32-le")


def _codes(text: str) -> np.ndarray:
    """Code points, uint32[characters]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def render_placeholders(template: ChatTemplate, replaced: Messages, tools: Any, whole: str) -> str | None:
    """Render messages with placeholders; None if the result does not match ``whole``, the normal rendering."""
    try:
        other = template.render(replaced, tools)
    except RowDropped:
        return None
    if len(other) != len(whole) or PLACEHOLDER.search(whole):
        return None
    codes = _codes(other)
    return other if ((codes >= FIRST) | (codes == _codes(whole))).all() else None


def message_of(placeholder: str) -> int:
    """Index of the message that a placeholder belongs to."""
    return (ord(placeholder) - FIRST) % (NAMES - FIRST)


def text_spans(other: str, replaced: Messages) -> list[TextSpan]:
    """Spans of message texts in a rendering with placeholders, in order; adjacent spans of one message are merged."""
    names = {
        index: sum(call["function"]["name"][:1] == chr(NAMES + index) for call in message.get("tool_calls", ()))
        for index, message in enumerate(replaced)
    }
    codes = _codes(other)
    (places,) = np.nonzero(codes >= FIRST)
    placeholders = codes[places]
    # A text extends up to the next text; a name is one word.
    new = (np.diff(placeholders, prepend=0) != 0) | ((np.diff(places, prepend=-1) > 1) & (placeholders >= NAMES))
    starts = np.flatnonzero(new)
    found: list[TextSpan] = []
    for first, last in zip(starts.tolist(), [*(starts[1:] - 1).tolist(), len(places) - 1], strict=False):
        message, start = message_of(chr(placeholders[first])), int(places[first])
        if placeholders[first] >= NAMES:
            names[message] -= 1
            if names[message] < 0:  # repeated
                continue
        if found and found[-1].message == message:
            start = found.pop().start
        found.append(TextSpan(message, start, int(places[last]) + 1))
    return found


@dataclass(frozen=True)
class PlacedTexts:
    """The visible characters of messages in a rendering.

    Attributes:
        text, other: code points of the rendering, and of the one with placeholders.
        contents: content of each message.
    """

    text: np.ndarray
    other: np.ndarray
    contents: tuple[str, ...]

    def visible(self, message: int) -> str:
        """The visible characters of a message's content."""
        codes = _codes(self.contents[message])
        return codes[_VISIBLE[codes]].tobytes().decode("utf-32-le", "surrogatepass")

    def shown(self, message: int, ranges: Sequence[tuple[int, int]] | None) -> tuple[str, int | None]:
        """The characters of a message in the rendering, or in ranges of it, and the place of the first."""
        found = self.other == FIRST + message
        if ranges is not None:
            inside = np.zeros_like(found)
            for start, end in ranges:
                inside[start:end] = True
            found &= inside
        places = np.flatnonzero(found)
        text = self.text[places].tobytes().decode("utf-32-le", "surrogatepass")
        return text, int(places[0]) if len(places) else None


def placed_texts(template: ChatTemplate, messages: Messages, tools: Any, whole: str) -> PlacedTexts | None:
    """Find the characters of all messages in a rendering; None if placeholders cannot tell.

    Args:
        template: the chat template.
        messages: marked messages.
        tools: marked tools.
        whole: the rendering of both.
    """
    other = render_placeholders(template, with_placeholders(template, messages), tools, whole)
    if other is None:
        return None
    return PlacedTexts(_codes(whole), _codes(other), tuple(one["content"] for one in messages))


def text_ranges(template: ChatTemplate, messages: Messages, tools: Any, whole: str) -> dict[int, tuple[int, int]]:
    """Character ranges of non-assistant texts by message index, for texts that are rendered unchanged.

    Args:
        template: the chat template.
        messages: marked messages.
        tools: marked tools.
        whole: the rendering of both.
    """
    replaced = with_placeholders(template, messages)
    other = render_placeholders(template, replaced, tools, whole)
    found: dict[int, tuple[int, int]] = {}
    for span in text_spans(other or "", replaced):
        message = messages[span.message]
        if message["role"] == "assistant" or span.message in found:
            continue
        text = message["content"].replace(BREAK, "")
        first = replaced[span.message]["content"].replace(BREAK, "").index(chr(FIRST + span.message))
        for written, before in ((text, first), (text.strip(), first - len(text) + len(text.lstrip()))):
            if before <= span.start and whole.startswith(written, span.start - before):
                found[span.message] = (span.start - before, span.start - before + len(written))
                break
    return found
