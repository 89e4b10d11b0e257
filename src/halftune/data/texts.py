"""Finds the texts of the messages that the assistant did not write in a rendered conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from halftune.data.chat import ChatTemplate
from halftune.data.control import BREAK
from halftune.data.conversation import RowDropped

Range = tuple[int, int]


def text_ranges(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, whole: str) -> dict[int, Range]:
    """Characters of the texts, by message; those that the template writes out as they are.

    The conversation is rendered once more with other texts in their place; what stands between them is the same in
    both renderings, which tells a user's text from the same words in the system message. Where the template writes
    something else for other texts, the texts are looked for one behind the other.

    Args:
        template: the chat template.
        messages: marked.
        tools: marked too.
        whole: their rendering.
    """
    others = {
        index: f"Zq{index} halftune text {index}qZ"
        for index, message in enumerate(messages)
        if message["role"] != "assistant" and message["content"].strip()
    }
    changed = [{**message, "content": others.get(index, message["content"])} for index, message in enumerate(messages)]
    try:
        other = template.render(changed, tools)
    except RowDropped:  # it refuses the other texts
        return _searched(messages, whole)
    for written in (str, str.strip):  # as it is, or trimmed by the template
        found = _between(messages, others, other, whole, written)
        if found is not None:
            return found
    return _searched(messages, whole)


def _between(
    messages: list[dict[str, Any]], others: Mapping[int, str], other: str, whole: str, written: Callable[[str], str]
) -> dict[int, Range] | None:
    found, here, there = {}, 0, 0
    for index, stand_in in others.items():
        place = other.find(stand_in, there)
        if place < 0:  # the template leaves this message out
            continue
        start = here + place - there
        text = written(messages[index]["content"].replace(BREAK, ""))
        if whole[here:start] != other[there:place] or not whole.startswith(text, start):
            return None
        here, there = start + len(text), place + len(stand_in)
        found[index] = (start, here)
    return found if whole[here:] == other[there:] else None


def _searched(messages: list[dict[str, Any]], whole: str) -> dict[int, Range]:
    found, position = {}, 0
    for index, message in enumerate(messages):
        text = message["content"].strip().replace(BREAK, "")
        place = whole.find(text, position) if text else -1
        if place < 0:
            continue
        position = place + len(text)
        if message["role"] != "assistant":
            found[index] = (place, position)
    return found
