"""Finds what a message itself adds to a rendering: the part of a turn that changes when the message does.

The conversation is rendered a second time with every trained answer replaced by one placeholder, without its reasoning
and tool calls. What both renderings of a turn begin and end with comes from the template.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from halftune.data.formats.conversation import RowDropped
from halftune.data.templates.assistant_turns import LOST, Turn
from halftune.data.templates.message_placeholders import FIRST
from halftune.data.templates.render import ChatTemplate, shared

_HEADER = 32  # characters before a turn that both renderings share
_GAP = 3  # control tokens and stretches of white space that may stand between a text and its end-of-turn token

Range = tuple[int, int]


def own_ranges(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Any, turns: Sequence[Turn], text: str
) -> list[Range]:
    """Character ranges of the trained turns that their messages decide.

    Args:
        template: the chat template.
        messages, tools: as they were rendered, with marks.
        turns: the assistant turns.
        text: the rendering.

    Raises:
        RowDropped: the template repeats or omits an answer, or splits it into several turns.
    """
    trained = [turn for turn in turns if turn.trained]
    places = {turn.message: chr(FIRST + turn.message) for turn in trained}
    replaced = list(messages)
    for index, placeholder in places.items():
        replaced[index] = {"role": "assistant", "content": placeholder}
    other = template.render(replaced, tools)
    if len(places) < len(trained) or any(other.count(placeholder) != 1 for placeholder in places.values()):
        raise RowDropped(LOST)
    found = [_changed(turn, text, *other.split(places[turn.message])) for turn in trained]
    return [(start, end) for start, end in found if start < end]


def _changed(turn: Turn, text: str, before: str, after: str) -> Range:
    """The range of a turn between what it shares with the other rendering, before and after the placeholder."""
    header = text[max(0, turn.start - _HEADER) : turn.start]
    while header and header not in before:  # earlier answers are other ones there
        header = header[1:]
    opening = before[before.rfind(header) + len(header) :] if header else before
    whole = text[turn.start : turn.end]
    start = shared(opening, whole)
    closings = range(min(len(after), len(whole) - start), -1, -1)
    closing = next(length for length in closings if whole.endswith(after[:length]))
    return turn.start + start, turn.end - closing


def ends_after(template: ChatTemplate, ranges: Sequence[Range], text: str, tokens: Collection[str]) -> list[Range]:
    """Ranges of the first of ``tokens`` after each range, where it follows closely."""
    wanted = {template.control.alias_of(token) for token in tokens if token in template.control.tokens}
    return [(place, place + 1) for _, end in ranges if (place := _end(template, text, end, wanted)) >= 0]


def _end(template: ChatTemplate, text: str, place: int, wanted: Collection[str]) -> int:
    gap = 0
    while place < len(text) and gap <= _GAP:
        character = text[place]
        if character in wanted:
            return place
        if not character.isspace() and not template.control.is_alias(character):
            return -1
        gap += not (character.isspace() and text[place - 1].isspace())
        place += 1
    return -1
