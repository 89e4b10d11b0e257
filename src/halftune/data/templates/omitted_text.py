"""Compares a rendering with the texts of its row, and names what the chat template omits or changes.

Most texts stand in the rendering as they are, and a search finds them. Others, which a template moves or rewrites, are
looked for by placeholders, which tell a text from an equal one elsewhere. White space, the escapes of JSON, and the
reasoning of answers before the last question may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from halftune.data.formats.conversation import Conversation, RowDropped
from halftune.data.templates.assistant_turns import Turn
from halftune.data.templates.control_tokens import MEDIA, texts_of
from halftune.data.templates.features import TOOL
from halftune.data.templates.message_placeholders import Messages, placed_texts
from halftune.data.templates.render import ChatTemplate

NO_TOOLS = "the chat template does not support tools: they are omitted"
LOST_TOOLS = "the chat template omits a tool, its description or a parameter"
NO_SYSTEM_SHOWN = "the chat template omits the system message (set data.merge_system: true to keep it)"
LOST_TEXT = {
    role: f"the chat template omits text of a {role} message: answers are trained without it"
    for role in ("system", "user", "tool")
}
MOVED = "the chat template moves a user message away from its answer"
NO_REASONING = "the chat template does not support reasoning: it is not trained"
LOST_REASONING = "the chat template omits the reasoning in an answer's text (<think>): it is not trained"
LEFT_OUT = "the chat template omits text of an answer: it is not trained"
LOSSES = frozenset(
    (NO_TOOLS, LOST_TOOLS, NO_SYSTEM_SHOWN, *LOST_TEXT.values(), MOVED, NO_REASONING, LOST_REASONING, LEFT_OUT)
)
_THOUGHT = "</think>"
_WORD = "Zq9halftune9qZ"


def losses(
    template: ChatTemplate, conversation: Conversation, marked: Messages, tools: Any, text: str, turns: Sequence[Turn]
) -> list[str]:
    """Name what a rendering lacks of a conversation, once each; empty if it has every text.

    Args:
        template: the chat template.
        conversation: its texts, without marks.
        marked: the messages with marks, as they were rendered.
        tools: the tools with marks.
        text: the rendering.
        turns: its answers.
    """
    messages = conversation.messages
    notes = [*_unsupported(template, conversation, text, turns)]
    ranges: dict[int, list[tuple[int, int]]] = {}
    for turn in turns:
        ranges.setdefault(turn.message, []).append((turn.start, turn.end))
    calling = [index for index, message in enumerate(messages) if message.get("tool_calls")]
    if not all(_shows_arguments(messages[index], _cut(text, ranges.get(index, []))) for index in calling):
        notes.append(LEFT_OUT)
    if doubtful := _doubtful(template, conversation, text, ranges):
        notes += _lost(template, messages, marked, tools, text, ranges, doubtful)
    return list(dict.fromkeys(notes))


def _unsupported(template: ChatTemplate, conversation: Conversation, text: str, turns: Sequence[Turn]) -> Iterator[str]:
    """What a template has no place for: tools, reasoning, a system message."""
    messages, features, tools = conversation.messages, template.features, conversation.tools
    if tools and "tools" not in template.source(tools):
        yield NO_TOOLS
    elif tools and not _shows_tools(tools, text, turns):
        yield LOST_TOOLS
    if features.reasoning is None and any("reasoning_content" in message for message in messages):
        yield NO_REASONING
    if not features.system and messages[0]["role"] == "system":
        yield NO_SYSTEM_SHOWN


def _cut(text: str, ranges: Sequence[tuple[int, int]]) -> str:
    if len(ranges) == 1:
        return text[ranges[0][0] : ranges[0][1]]
    return "".join([text[start:end] for start, end in ranges])


def _doubtful(
    template: ChatTemplate, conversation: Conversation, text: str, ranges: Mapping[int, list[tuple[int, int]]]
) -> dict[int, bool]:
    """The messages whose text a search does not find in its place, with whether it finds it nowhere.

    A text between two answers may be one that the template writes itself, such as the name of a role.
    """
    messages = conversation.messages
    frame = _frame(template, bool(conversation.tools))
    if conversation.tools:
        frame += texts_of(conversation.tools)
    asked, doubtful, at = _last_question(messages), dict[int, bool](), 0
    limits, limit = [0] * len(messages), len(text)
    for index in range(len(messages) - 1, -1, -1):
        if index in ranges:
            limit = min(limit, ranges[index][0][0])
        limits[index] = limit
    for index, message in enumerate(messages):
        said = message["content"].strip()
        if message["role"] == "assistant":
            places = ranges.get(index, [])
            if said and _end(template, _kept(said, index, asked), _cut(text, places)) < 0:
                doubtful[index] = True
            at = max(at, places[-1][1]) if places else at
        elif said:
            end = _end(template, said, text, at, limits[index])
            if end < 0 or said in frame:
                doubtful[index] = end < 0
            at = max(at, end)
    return doubtful


def _end(template: ChatTemplate, said: str, text: str, at: int = 0, limit: int | None = None) -> int:
    """Where a text ends in ``text[at:limit]``, or -1. Tags and images in it may be written in another way."""
    if (first := text.find(said, at, limit)) >= 0:
        return first + len(said)
    for piece in _pieces(template, said):
        if (first := text.find(piece, at, limit)) < 0:
            return -1
        at = first + len(piece)
    return at


def _pieces(template: ChatTemplate, said: str) -> list[str]:
    """The parts of a text between tags of the template and images."""
    for one in MEDIA:
        said = said.replace(one, "\0")
    parts = [part for piece in template.literals.split(said)[::2] for part in piece.split("\0")]
    return [part.strip() for part in parts if part.strip()]


def _last_question(messages: Messages) -> int:
    return max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _kept(said: str, index: int, asked: int) -> str:
    """What a template must keep of an answer: of one before the last question, not its reasoning."""
    return said.rpartition(_THOUGHT)[2].strip() if index < asked else said


def _lost(
    template: ChatTemplate,
    messages: Messages,
    marked: Messages,
    tools: Any,
    text: str,
    ranges: Mapping[int, list[tuple[int, int]]],
    doubtful: Mapping[int, bool],
) -> Iterator[str]:
    """Notes about the messages among ``doubtful`` whose text is not in the rendering, or in another place."""
    asked, placed = _last_question(messages), placed_texts(template, marked, tools, text)
    if placed is None:
        doubtful = {index: True for index, missing in doubtful.items() if missing}
    squeezed = "" if placed else _squeezed(text)
    for index in doubtful:
        answers = messages[index]["role"] == "assistant"
        if placed:
            shown, first = placed.shown(index, ranges.get(index) if answers else None)
            said = placed.visible(index)
        else:  # what the template writes depends on the words: look for them
            first, said = None, messages[index]["content"].strip()
            shown = _squeezed(_cut(text, ranges.get(index, []))) if answers else squeezed
        if not _is_shown(template, _kept(said, index, asked), shown):
            yield _note(template, index, messages[index]["role"], said, shown)
        elif messages[index]["role"] == "user" and first is not None and _is_moved(first, index, ranges):
            yield MOVED


def _note(template: ChatTemplate, index: int, role: str, said: str, shown: str) -> str:
    """What a message loses whose text ``said`` is not among the characters ``shown``."""
    if role != "assistant":
        return LOST_TEXT[role] if index or role != "system" or template.features.system else NO_SYSTEM_SHOWN
    reasoned = _THOUGHT in said and _is_shown(template, said.rpartition(_THOUGHT)[2], shown)
    return LOST_REASONING if reasoned else LEFT_OUT


def _is_moved(first: int, index: int, ranges: Mapping[int, list[tuple[int, int]]]) -> bool:
    """Whether a text that begins at ``first`` stands before an earlier answer, or after a later one."""
    return any(
        (first < start) if other < index else (first > end) for other, one in ranges.items() for start, end in one
    )


def _is_shown(template: ChatTemplate, said: str, squeezed: str) -> bool:
    """Whether all pieces of a text stand in a text without white space, as they are or as JSON."""
    return all(
        any(_squeezed(form) in squeezed for form in _forms(piece)) for piece in _pieces(template, said)
    )  # fmt: skip


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _forms(text: str) -> Iterator[str]:
    """A text as it is, as JSON, and in Python."""
    yield text
    yield (escaped := json.dumps(text, ensure_ascii=False)[1:-1])
    yield json.dumps(text)[1:-1]
    yield json.dumps(escaped, ensure_ascii=False)[1:-1]
    yield repr(text)[1:-1]


def _shows_arguments(message: Mapping[str, Any], answer: str) -> bool:
    """Whether texts and whole numbers among the arguments of tool calls stand in an answer, as they are or as JSON."""
    for call in message.get("tool_calls", ()):
        if not all(any(form in answer for form in _forms(one)) for one in _leaves(call["function"]["arguments"])):
            return False
    return True


def _leaves(value: Any) -> Iterator[str]:
    """The keys, texts and whole numbers in arguments. Templates write other values in several ways."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key)
            yield from _leaves(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)


def _shows_tools(tools: Sequence[Mapping[str, Any]], text: str, turns: Sequence[Turn]) -> bool:
    """Whether names, descriptions and parameters of all tools stand in a rendering, outside of its answers."""
    edges = [0, *(edge for turn in turns for edge in (turn.start, turn.end)), len(text)]
    outside = "".join([text[first:last] for first, last in zip(edges[::2], edges[1::2], strict=True)])
    missing = [one for tool in tools for one in _words(tool) if one not in outside]
    squeezed = _squeezed(outside) if missing else ""
    return all(any(_squeezed(form) in squeezed for form in _forms(one)) for one in missing)


def _words(value: Any) -> Iterator[str]:
    """The names and descriptions in a tool: of itself and of its parameters, at every depth."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from _words(one)
    for key, one in value.items() if isinstance(value, Mapping) else ():
        if key in ("name", "description") and isinstance(one, str):
            yield one.strip()
        elif key == "properties" and isinstance(one, Mapping):
            yield from one
        yield from _words(one)


@lru_cache(maxsize=8)
def _frame(template: ChatTemplate, tools: bool) -> str:
    """What a template writes around the texts of messages."""
    turns: list[dict[str, Any]] = [{"role": role, "content": _WORD} for role in ("user", "assistant", "user")]
    for messages in ([{"role": "system", "content": _WORD}, *turns], turns):
        try:
            return template.render(messages, [TOOL] if tools else None, prompt=True).replace(_WORD, "\0")
        except RowDropped:
            continue
    return ""
