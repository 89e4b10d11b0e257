"""Finds the assistant's turns in a rendered conversation, by comparing renderings or by ``{% generation %}``.

The turn of message *i* begins where the rendering of the messages before it, with the header of an answer, ends; it
ends where the rendering of the messages up to it ends. Templates that write a turn differently once more turns follow
(reasoning is dropped, an empty thought block is put in) break these prefixes; then the turn's header and its
end-of-turn token are looked for in the whole rendering, where no text can hold either (``control.py``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halftune.data.chat import ChatTemplate
from halftune.data.control import BREAK
from halftune.data.conversation import Conversation, RowDropped, RowError
from halftune.data.texts import text_ranges

REWRITTEN = "the chat template rewrites earlier turns (they are trained as it renders them)"
NEUTRALISED = "control tokens in texts were kept as plain text"
NO_END = "the chat template writes no end-of-turn token after an answer, so the model does not learn to stop"
NO_TOOLS = "the chat template has no place for tools, so they are not shown to the model"
NO_REASONING = "the chat template has no place for reasoning, so it is not trained"
_OTHER_TEXT = "Zq9 halftune next 9qZ"
LOST = "the loss mask cannot be found: the chat template rewrites this conversation"


@dataclass(frozen=True)
class Turn:
    """An assistant's turn in the rendering, in characters.

    Attributes:
        message: index of its message.
        start, end: what the model is to write, its end-of-turn token included.
        full_end: where the turn's text ends, e.g. behind the line break after the end-of-turn token.
        complete: whether an end-of-turn token closes it.
        trained: whether it carries labels.
    """

    message: int
    start: int
    end: int
    full_end: int
    complete: bool
    trained: bool = False


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation.

    Attributes:
        text: with aliases for the template's control tokens.
        turns: the assistant's turns, in order.
        messages: the messages as they were rendered, marks included.
        tools: the tools, likewise.
        notes: what the report should count.
        untrained: characters that are not trained, whatever ``train_on`` says: texts of others that the row marks so.
    """

    text: str
    turns: tuple[Turn, ...]
    messages: list[dict[str, Any]]
    tools: Any
    notes: tuple[str, ...]
    untrained: tuple[tuple[int, int], ...] = ()


def render_turns(template: ChatTemplate, conversation: Conversation, train_on: str) -> Rendering:
    """Renders a conversation and finds the turns to train.

    Args:
        template: the chat template.
        conversation: its texts may hold anything.
        train_on: ``assistant``, ``last`` or ``all``, as in ``method.train_on``.

    Raises:
        RowDropped: the template refuses the conversation, or a mask cannot be found.
        RowError: the row wants another's message trained, and ``train_on`` is not ``all``.
    """
    _check_wishes(conversation, train_on)
    control = template.control
    parts = [conversation.messages, conversation.tools]
    if control.forged(parts):
        raise RowDropped("it holds private-use characters (U+F5000 and above) that halftune needs for itself")
    notes = list(conversation.notes)
    messages, tools = conversation.messages, conversation.tools
    if control.occurs(parts):
        notes.append(NEUTRALISED)
        messages, tools = control.mark(messages), control.mark(tools)
    text, turns = _find(template, messages, tools, notes)
    if turns and not all(turn.complete for turn in turns):
        notes.append(NO_END)
    _check_rendered(template, conversation, text, turns, notes)
    chosen = _chosen(turns, conversation, train_on)
    untrained: tuple[tuple[int, int], ...] = ()
    if train_on == "all" and False in conversation.train:
        untrained = _untrained(template, conversation, messages, tools, text)
    return Rendering(text, chosen, messages, tools, tuple(notes), untrained)


def _untrained(
    template: ChatTemplate, conversation: Conversation, messages: list[dict[str, Any]], tools: Any, text: str
) -> tuple[tuple[int, int], ...]:
    """The texts of others that the row marks as not to be trained; matters where everything else is."""
    marked = [
        index
        for index, (message, wish) in enumerate(zip(messages, conversation.train, strict=True))
        if wish is False and message["role"] != "assistant" and message["content"].strip()
    ]
    if not marked:
        return ()
    places = text_ranges(template, messages, tools, text)
    if not all(index in places for index in marked):
        raise RowDropped("a text that is marked not to be trained cannot be found in the rendering")
    return tuple(places[index] for index in marked)


def _check_wishes(conversation: Conversation, train_on: str) -> None:
    for message, wish in zip(conversation.messages, conversation.train, strict=True):
        if wish and message["role"] != "assistant" and train_on != "all":
            raise RowError(
                f"a {message['role']} message is marked to be trained, and method.train_on: {train_on} trains "
                f"assistant turns only",
                "remove the mark, or set method: {type: sft, train_on: all}",
            )


def _find(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, notes: list[str]
) -> tuple[str, list[Turn]]:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if template.has_generation:
        text, spans = template.render_generation(messages, tools)
        if len(spans) == len(answers):
            return text, [_generated(template, text, index, span) for index, span in zip(answers, spans, strict=True)]
    whole = template.render(messages, tools)
    turns: list[Turn] = []
    for index in answers:
        after = turns[-1].end if turns else 0
        start = _start(template, messages, tools, index, whole, after)
        turns.append(_compared(template, messages, tools, index, whole, start, notes))
    return whole, turns


def _generated(template: ChatTemplate, text: str, index: int, span: tuple[int, int]) -> Turn:
    """A turn that the template itself marks; an end-of-turn token right behind it belongs to it."""
    start, end = span
    if end < len(text) and text[end] in template.end_tokens and text[end - 1 : end] not in template.end_tokens:
        end += 1
    inside = text[start:end].rstrip()
    return Turn(index, start, end, end, complete=bool(inside) and inside[-1] in template.end_tokens)


def _start(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, index: int, whole: str, after: int
) -> int:
    if index > 0:
        prompt = template.render(messages[:index], tools, prompt=True)
        if whole.startswith(prompt) and len(prompt) >= after:
            return len(prompt)
    position = whole.find(template.header, after) if template.header else -1
    if position < 0:
        raise RowDropped(LOST)
    return position + len(template.header)


def _compared(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: Any,
    index: int,
    whole: str,
    start: int,
    notes: list[str],
) -> Turn:
    through = whole if index == len(messages) - 1 else template.render(messages[: index + 1], tools)
    if whole.startswith(through) and len(through) > start:
        full_end = len(through)
    else:
        full_end = _searched_end(template, messages, tools, index, whole, start)
        if REWRITTEN not in notes:
            notes.append(REWRITTEN)
    # What the template writes behind the last control token (a line break) is not for the model to write.
    body = whole[start:full_end].rstrip()
    complete = bool(body) and template.control.is_alias(body[-1])
    return Turn(index, start, start + len(body) if complete else full_end, full_end, complete)


def _searched_end(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, index: int, whole: str, start: int
) -> int:
    """Where a turn ends that the template writes differently once more turns follow: before the next message."""
    if index == len(messages) - 1:  # the template writes nothing of it
        return len(whole)
    ends = [place for place in (whole.find(token, start) for token in template.end_tokens) if place >= 0]
    following = messages[index + 1]["content"].strip().replace(BREAK, "")
    if ends and following and min(ends) < whole.find(following, start):
        return min(ends) + 1
    limit = _next_text(template, messages, tools, index, whole, start)
    if ends and min(ends) < limit:
        return min(ends) + 1
    # No end-of-turn token closes it. Where it is its text and nothing else, its end is known all the same.
    content = messages[index]["content"].strip().replace(BREAK, "")
    place = start + len(whole[start:]) - len(whole[start:].lstrip())
    alone = content and not messages[index].keys() & {"tool_calls", "reasoning_content"}
    if alone and whole.startswith(content, place) and place + len(content) <= limit:
        return place + len(content)
    raise RowDropped(LOST)


def _next_text(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, index: int, whole: str, start: int
) -> int:
    """Where in the rendering the text of the next message that it shows begins; its end where it shows no more.

    Found by rendering the message with another text: up to that text, the rendering is the same.

    Raises:
        RowDropped: that changes what comes before it.
    """
    for following in range(index + 1, len(messages)):
        changed = [*messages]
        changed[following] = {**messages[following], "content": _OTHER_TEXT}
        other = template.render(changed, tools)
        place = other.find(_OTHER_TEXT)
        if place < 0:
            continue
        if place < start or other[:place] != whole[:place]:
            raise RowDropped(LOST)
        return place
    return len(whole)


def _check_rendered(
    template: ChatTemplate, conversation: Conversation, text: str, turns: Sequence[Turn], notes: list[str]
) -> None:
    """Nothing of the row may be lost without a word: tool calls, tools, reasoning."""
    source = template.source(conversation.tools)
    if conversation.tools and "tools" not in source:
        notes.append(NO_TOOLS)
    if any("reasoning_content" in message for message in conversation.messages) and not (
        "reasoning" in source or "thinking" in source
    ):
        notes.append(NO_REASONING)
    for turn in turns:
        message = conversation.messages[turn.message]
        written = text[turn.start : turn.end]
        for call in message.get("tool_calls", ()):
            name = json.dumps(call["function"]["name"], ensure_ascii=False)[1:-1]
            if name not in written and call["function"]["name"] not in written:
                raise RowDropped("the chat template does not render tool calls")


def _chosen(turns: Sequence[Turn], conversation: Conversation, train_on: str) -> tuple[Turn, ...]:
    """Sets ``trained``: what the row says of a message goes before ``method.train_on``."""
    last = turns[-1].message if turns else -1
    chosen = []
    for turn in turns:
        wish = conversation.train[turn.message]
        default = turn.message == last if train_on == "last" else True
        message = conversation.messages[turn.message]
        empty = not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))
        trained = (default if wish is None or (train_on == "last" and not default) else wish) and not empty
        chosen.append(Turn(turn.message, turn.start, turn.end, turn.full_end, turn.complete, trained))
    return tuple(chosen)
