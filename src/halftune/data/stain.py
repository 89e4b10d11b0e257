"""Tells which characters of a rendering come from which message.

The conversation is rendered once more with every visible character of a message replaced by one private character of
that message. Both renderings must agree wherever neither shows a text; then the private characters say whose text
stands where, whatever the template moves, repeats or leaves out, and however often a text occurs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halftune.data.chat import ChatTemplate
from halftune.data.control import BREAK
from halftune.data.conversation import RowDropped

FIRST, NAMES = 0x100000, 0x108000  # the second private plane; control.py uses the first one
RUN = re.compile(f"([{chr(FIRST)}-\U0010ffff])\\1*")
# White space is trimmed by templates, quotes and backslashes are escaped by ``tojson``, and so are control characters.
_VISIBLE = re.compile(rf'[^\s"\\\x00-\x1f\x7f{BREAK}]')
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

    def cover(value: Any) -> Any:
        if isinstance(value, str):
            pieces = template.literals.split(value)
            return "".join(piece if number % 2 else _VISIBLE.sub(ink, piece) for number, piece in enumerate(pieces))
        if isinstance(value, Mapping):
            return {key: cover(item) for key, item in value.items()}
        return [cover(item) for item in value] if isinstance(value, list | tuple) else value

    changed = {**message, **{key: cover(message[key]) for key in _TEXTS if key in message}}
    calls = []
    for call in message.get("tool_calls") or ():
        function = {**call["function"], "arguments": cover(call["function"]["arguments"])}
        if ink not in json.dumps(function["arguments"], ensure_ascii=False):
            function["name"] = _VISIBLE.sub(name_ink, function["name"])
        calls.append({**call, "function": function})
    return {**changed, "tool_calls": calls} if calls else changed


def trace(template: ChatTemplate, covered: Messages, tools: Any, whole: str) -> str | None:
    """The rendering of stained messages, as long as ``whole``, that of the messages; None where they do not agree."""
    if RUN.search(whole):
        return None
    try:
        other = template.render(covered, tools)
    except RowDropped:
        return None
    position = 0
    for match in RUN.finditer(other):
        if other[position : match.start()] != whole[position : match.start()]:
            return None
        position = match.end()
    return other if other[position:] == whole[position:] else None


def owner(ink: str) -> int:
    """The message that a private character stands for."""
    return (ord(ink) - FIRST) % (NAMES - FIRST)


def runs(other: str, covered: Messages) -> list[Run]:
    """The texts in the rendering of stained messages, in order; neighbouring ones of one message are one."""
    names = {
        index: sum(call["function"]["name"][:1] == chr(NAMES + index) for call in message.get("tool_calls", ()))
        for index, message in enumerate(covered)
    }
    found: list[Run] = []
    for match in RUN.finditer(other):
        message, start = owner(match[1]), match.start()
        if ord(match[1]) >= NAMES:
            names[message] -= 1
            if names[message] < 0:  # repeated
                continue
        if found and found[-1].message == message:
            start = found.pop().start
        found.append(Run(message, start, match.end()))
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
