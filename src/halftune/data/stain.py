"""Tells which characters of a rendering come from which message.

The conversation is rendered once more with every visible character of a message replaced by one private character of
that message. Both renderings must agree wherever neither shows a text; then the private characters say whose text
stands where, whatever the template moves, repeats or leaves out, and however often a text occurs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halftune.data.chat import ChatTemplate
from halftune.data.control import BREAK
from halftune.data.conversation import RowDropped

FIRST, NAMES = 0x100000, 0x108000  # the second private plane; control.py uses the first one
INK = re.compile("[\U00100000-\U0010ffff]")
# White space is trimmed by templates; quotes, backslashes and control characters are escaped by ``tojson``.
_VISIBLE = np.ones(sys.maxunicode + 1, dtype=bool)
_VISIBLE[[*range(0x21), *map(ord, '"\\\x7f'), ord(BREAK), *(code for code in range(0x3001) if chr(code).isspace())]] = (
    False
)
_TEXTS = ("content", "reasoning_content")

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """Text of one message in a rendering, in characters.

    Attributes:
        message: its index.
        start, end: from its first visible character to behind its last one; no other message's text in between.
    """

    message: int
    start: int
    end: int


def stained(template: ChatTemplate, messages: Messages) -> list[dict[str, Any]]:
    """The messages with their visible characters replaced, each by the private character of its message.

    Texts that the template may look for (``</think>``) stay. A tool call without a text shows by its name, which has a
    character of its own: templates repeat it in front of the result.
    """
    return [_stained(template, message, index) for index, message in enumerate(messages)]


def _stained(template: ChatTemplate, message: Mapping[str, Any], index: int) -> dict[str, Any]:
    ink, name_ink = chr(FIRST + index), chr(NAMES + index)

    def cover(value: Any, ink: str = ink) -> Any:
        if isinstance(value, str):
            pieces = template.literals.split(value)
            pieces[::2] = [_covered(piece, ink) for piece in pieces[::2]]
            return "".join(pieces)
        if isinstance(value, Mapping):
            return {key: cover(item) for key, item in value.items()}
        return [cover(item) for item in value] if isinstance(value, list | tuple) else value

    changed = {**message, **{key: cover(message[key]) for key in _TEXTS if key in message}}
    calls = []
    for call in message.get("tool_calls") or ():
        function = {**call["function"], "arguments": cover(call["function"]["arguments"])}
        if ink not in json.dumps(function["arguments"], ensure_ascii=False):
            function["name"] = cover(function["name"], name_ink)
        calls.append({**call, "function": function})
    return {**changed, "tool_calls": calls} if calls else changed


def _covered(text: str, ink: str) -> str:
    codes = _codes(text).copy()
    codes[_VISIBLE[codes]] = ord(ink)
    return codes.tobytes().decode("utf-32-le")


def _codes(text: str) -> np.ndarray:
    """Code points, uint32[characters]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def trace(template: ChatTemplate, covered: Messages, tools: Any, whole: str) -> str | None:
    """The rendering of stained messages, as long as ``whole``, that of the messages; None where they do not agree."""
    try:
        other = template.render(covered, tools)
    except RowDropped:
        return None
    if len(other) != len(whole) or INK.search(whole):
        return None
    codes = _codes(other)
    return other if ((codes >= FIRST) | (codes == _codes(whole))).all() else None


def owner(ink: str) -> int:
    """The message that a private character stands for."""
    return (ord(ink) - FIRST) % (NAMES - FIRST)


def runs(other: str, covered: Messages) -> list[Run]:
    """The texts in the rendering of stained messages, in order; neighbouring ones of one message are one."""
    names = {
        index: sum(call["function"]["name"][:1] == chr(NAMES + index) for call in message.get("tool_calls", ()))
        for index, message in enumerate(covered)
    }
    codes = _codes(other)
    (places,) = np.nonzero(codes >= FIRST)
    inks = codes[places]
    # A text goes on as far as no other comes; a name is one word.
    new = (np.diff(inks, prepend=0) != 0) | ((np.diff(places, prepend=-1) > 1) & (inks >= NAMES))
    starts = np.flatnonzero(new)
    found: list[Run] = []
    for first, last in zip(starts.tolist(), [*(starts[1:] - 1).tolist(), len(places) - 1], strict=False):
        message, start = owner(chr(inks[first])), int(places[first])
        if inks[first] >= NAMES:
            names[message] -= 1
            if names[message] < 0:  # repeated
                continue
        if found and found[-1].message == message:
            start = found.pop().start
        found.append(Run(message, start, int(places[last]) + 1))
    return found


def text_ranges(template: ChatTemplate, messages: Messages, tools: Any, whole: str) -> dict[int, tuple[int, int]]:
    """Characters of the texts that the assistant did not write, by message; those that are written out as they are.

    Args:
        template: the chat template.
        messages: marked.
        tools: marked too.
        whole: their rendering.
    """
    covered = stained(template, messages)
    other = trace(template, covered, tools, whole)
    found: dict[int, tuple[int, int]] = {}
    for run in runs(other or "", covered):
        message = messages[run.message]
        if message["role"] == "assistant" or run.message in found:
            continue
        text = message["content"].replace(BREAK, "")
        first = covered[run.message]["content"].replace(BREAK, "").index(chr(FIRST + run.message))
        for written, before in ((text, first), (text.strip(), first - len(text) + len(text.lstrip()))):
            if before <= run.start and whole.startswith(written, run.start - before):
                found[run.message] = (run.start - before, run.start - before + len(written))
                break
    return found
