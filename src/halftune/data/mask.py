"""Renders a conversation and chooses the assistant's turns that are trained; says what the template leaves out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halftune.data.chat import ChatTemplate
from halftune.data.conversation import Conversation, RowDropped, RowError
from halftune.data.locate import Turn, by_content, by_prefix
from halftune.data.stain import text_ranges

REWRITTEN = "the chat template rewrites earlier turns (they are trained as it renders them)"
NEUTRALISED = "control tokens in texts were kept as plain text"
NO_END = "the chat template writes no end-of-turn token after an answer, so the model does not learn to stop"
NO_TOOLS = "the chat template has no place for tools, so they are not shown to the model"
NO_SYSTEM_SHOWN = "the chat template leaves out the system message (data.merge_system puts it into the first question)"
NO_REASONING = "the chat template has no place for reasoning, so it is not trained"
LEFT_OUT = "the chat template leaves out an answer's text, so it is not trained"


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
    conversation = template.forms.of_conversation(conversation)
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
    chosen = _chosen(turns, conversation, text, train_on)
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
    turns, rewritten = by_prefix(template, messages, tools, answers, whole)
    notes += [REWRITTEN] * rewritten
    return whole, by_content(template, messages, tools, whole) if turns is None else turns


def _generated(template: ChatTemplate, text: str, index: int, span: tuple[int, int]) -> Turn:
    """A turn that the template itself marks; an end-of-turn token right behind it belongs to it."""
    start, end = span
    if end < len(text) and text[end] in template.end_tokens and text[end - 1 : end] not in template.end_tokens:
        end += 1
    inside = text[start:end].rstrip()
    return Turn(index, start, end, end, complete=bool(inside) and inside[-1] in template.end_tokens)


def _check_rendered(
    template: ChatTemplate, conversation: Conversation, text: str, turns: Sequence[Turn], notes: list[str]
) -> None:
    """Nothing of the row may be lost without a word: tools, tool calls, reasoning, system messages, answers."""
    messages = conversation.messages
    if conversation.tools and "tools" not in template.source(conversation.tools):
        notes.append(NO_TOOLS)
    if template.forms.reasoning is None and any("reasoning_content" in message for message in messages):
        notes.append(NO_REASONING)
    if not template.forms.system and messages[0]["role"] == "system":
        notes.append(NO_SYSTEM_SHOWN)
    for index, written in _written(conversation, text, turns).items():
        for call in messages[index].get("tool_calls", ()):
            name = json.dumps(call["function"]["name"], ensure_ascii=False)[1:-1]
            if name not in written and call["function"]["name"] not in written:
                raise RowDropped("the chat template does not render tool calls")
        if _left_out(messages[index]["content"], written) and LEFT_OUT not in notes:
            notes.append(LEFT_OUT)


def _written(conversation: Conversation, text: str, turns: Sequence[Turn]) -> dict[int, str]:
    """What the template makes of each answer."""
    written = {index: "" for index, message in enumerate(conversation.messages) if message["role"] == "assistant"}
    for turn in turns:
        written[turn.message] += text[turn.start : turn.end]
    return written


def _left_out(content: str, written: str) -> bool:
    """Whether nothing of a text is there; told by three of its words, as a template may trim or rewrite it."""
    words = content.split()
    return bool(words) and not any(word in written for word in (words[0], words[-1], max(words, key=len)))


def _chosen(turns: Sequence[Turn], conversation: Conversation, text: str, train_on: str) -> tuple[Turn, ...]:
    """Sets ``trained``: what the row says of a message goes before ``method.train_on``."""
    written = _written(conversation, text, turns)
    last = turns[-1].message if turns else -1
    chosen = []
    for turn in turns:
        wish = conversation.train[turn.message]
        default = turn.message == last if train_on == "last" else True
        message = conversation.messages[turn.message]
        alone = not (message.get("tool_calls") or message.get("reasoning_content"))
        empty = alone and (not message["content"].strip() or _left_out(message["content"], written[turn.message]))
        trained = (default if wish is None or (train_on == "last" and not default) else wish) and not empty
        chosen.append(Turn(turn.message, turn.start, turn.end, turn.full_end, turn.complete, trained))
    return tuple(chosen)
