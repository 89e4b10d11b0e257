"""Renders a conversation, selects the assistant turns to train, and reports what the template omits."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from halftune.data.formats.conversation import PLACEHOLDER, Conversation, RowDropped, RowError
from halftune.data.templates.assistant_turns import Turn, by_content, by_prefix
from halftune.data.templates.control_tokens import texts_of
from halftune.data.templates.features import NO_CALLS, WITH_TOOLS
from halftune.data.templates.message_placeholders import text_ranges
from halftune.data.templates.omitted_text import losses
from halftune.data.templates.render import TRUSTED, ChatTemplate

REWRITTEN = "the chat template rewrites earlier turns; they are trained as rendered"
NEUTRALISED = "control tokens in texts were kept as plain text"
NO_END = "the chat template adds no end-of-turn token after answers: the model does not learn to stop"
VAGUE = "the chat template does not show where an answer begins: it is not trained"
# a name in double braces that stands by itself, as in no code and no formula
_PLACEHOLDER = re.compile(r"(?<![\w{}^\\$])\{\{ ?[^\W\d][\w -]+\}\}(?![{}^])")
_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # templates rewrite a text at such tags
_RATIO, _SMALL = 100, 1 << 20  # largest ratio of a rendering's length to its texts'; length that is always accepted


class Rendering(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: the rendering, control tokens as aliases.
        turns: the assistant turns, in order.
        messages: the rendered messages, with marks.
        tools: the rendered tools, with marks.
        notes: changes that the report counts.
        untrained: character ranges without labels under ``train_on: all``: non-assistant texts that the row marks.
        media: references of its images, as ``Segment.media``.
        labels: character ranges of the trained turns that have labels; None: all of each.
        split: where tokens must end, the end of a prompt without chat template; 0: tokens may be anywhere.
    """

    text: str
    turns: tuple[Turn, ...]
    messages: list[dict[str, Any]]
    tools: Any
    notes: tuple[str, ...]
    untrained: tuple[tuple[int, int], ...] = ()
    split: int = 0
    labels: tuple[tuple[int, int], ...] | None = None
    media: bytes = b""

    @property
    def pieces(self) -> tuple[str, ...]:
        """The texts that are tokenised by themselves."""
        return (self.text[: self.split], self.text[self.split :]) if self.split else (self.text,)


def render_turns(
    template: ChatTemplate, conversation: Conversation, train_on: str, ends: Collection[str] | None = None
) -> Rendering:
    """Render a conversation and select the turns to train.

    Args:
        template: the chat template.
        conversation: the conversation; texts may contain control tokens.
        train_on: ``assistant``, ``last`` or ``all``, as in ``method.train_on``.
        ends: end-of-turn tokens with labels, where turns have labels on their own text only; None: on all of a turn.

    Raises:
        RowDropped: the template rejects the conversation, or the mask cannot be computed.
        RowError: the row marks a non-assistant message as trained, and ``train_on`` is not ``all``; or the rendering
            is too long.
    """
    _check_wishes(conversation, train_on)
    _check_tools(template, conversation)
    conversation = template.features.of_conversation(conversation)
    control = template.control
    said = texts_of([conversation.messages, conversation.tools])
    if control.has_private_characters(said):
        raise RowDropped("row with private-use characters (U+F5000 and above), which halftune reserves")
    notes = list(conversation.notes)
    messages, tools = conversation.messages, conversation.tools
    if control.occurs(said):
        notes.append(NEUTRALISED)
        messages, tools = control.mark(messages), control.mark(tools)
    text, turns = _find(template, messages, tools, notes)
    if len(text) > _RATIO * len(said) + _SMALL:
        what = f"the chat template renders {len(said):,} characters as {len(text):,}"
        raise RowError(what, TRUSTED)
    written = _written(conversation, text, turns)
    _check_calls(conversation, written)
    notes += [*_of_turns(turns), *losses(template, conversation, messages, tools, text, turns)]
    chosen = _chosen(turns, conversation, written, train_on)
    untrained: tuple[tuple[int, int], ...] = ()
    if train_on == "all" and False in conversation.train:
        untrained = _untrained(template, conversation, messages, tools, text)
    labels = None if ends is None else _own(template, messages, tools, chosen, text, ends)
    return Rendering(text, chosen, messages, tools, tuple(notes), untrained, labels=labels)


def with_placeholders(renderings: Sequence[Rendering]) -> tuple[Rendering, ...]:
    """The renderings of a row, with a note on the first ``{{name}}`` that nothing replaced. Documents keep theirs."""
    found = list(renderings)
    for index, one in enumerate(found):
        if "{{" in one.text and (one.messages or one.split) and (name := _PLACEHOLDER.search(one.text)):
            found[index] = one._replace(notes=(*one.notes, PLACEHOLDER + name[0]))
            break
    return tuple(found)


def lost_in_prompt(
    template: ChatTemplate, prompt: Conversation, messages: list[dict[str, Any]], tools: Any
) -> list[str]:
    """Notes about texts of a prompt that the template omits; ``messages`` and ``tools`` are those with marks."""
    text, turns = _find(template, messages, tools, [])
    return losses(template, prompt, messages, tools, text, turns)


def _of_turns(turns: Sequence[Turn]) -> list[str]:
    """Notes about what the template does not show of its turns."""
    found = [NO_END] if not all(turn.complete for turn in turns) else []
    return [*found, VAGUE] if any(turn.vague for turn in turns) else found


def _own(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: Any,
    turns: Sequence[Turn],
    text: str,
    ends: Collection[str],
) -> tuple[tuple[int, int], ...]:
    from halftune.data.templates.own_text import ends_after, own_ranges  # seldom used

    ranges = own_ranges(template, messages, tools, turns, text)
    return (*ranges, *ends_after(template, ranges, text, ends))


def _untrained(
    template: ChatTemplate, conversation: Conversation, messages: list[dict[str, Any]], tools: Any, text: str
) -> tuple[tuple[int, int], ...]:
    """Character ranges of non-assistant texts that the row marks as untrained, under ``train_on: all``."""
    marked = [
        index
        for index, (message, wish) in enumerate(zip(messages, conversation.train, strict=True))
        if wish is False and message["role"] != "assistant" and message["content"].strip()
    ]
    if not marked:
        return ()
    places = text_ranges(template, messages, tools, text)
    if not all(index in places for index in marked):
        raise RowDropped("the chat template rewrites a message with train: false: it was not found in the rendering")
    return tuple(places[index] for index in marked)


def _check_wishes(conversation: Conversation, train_on: str) -> None:
    for message, wish in zip(conversation.messages, conversation.train, strict=True) if any(conversation.train) else ():
        if wish and message["role"] != "assistant" and train_on != "all":
            raise RowError(
                f"train: true on a {message['role']} message; method.train_on: {train_on} trains assistant turns only",
                "remove it, or set method: {type: sft, train_on: all}",
            )


def _check_tools(template: ChatTemplate, conversation: Conversation) -> None:
    used = conversation.tools or any(message.get("tool_calls") for message in conversation.messages)
    if used and template.refuses_tools:
        raise RowError(
            "row with tools; the format of model.chat_template defines none",
            f"{WITH_TOOLS}, or remove the row",
            "data.tools_unsupported",
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
    """A turn marked by the template; a directly following end-of-turn token belongs to it."""
    start, end = span
    if end < len(text) and text[end] in template.end_tokens and text[end - 1 : end] not in template.end_tokens:
        end += 1
    inside = text[start:end].rstrip()
    return Turn(index, start, end, end, complete=bool(inside) and inside[-1] in template.end_tokens)


def _check_calls(conversation: Conversation, written: Mapping[int, str]) -> None:
    """Drop a conversation whose tool calls the template omits."""
    for index, answer in written.items():
        for call in conversation.messages[index].get("tool_calls", ()):
            name = call["function"]["name"]
            if name not in answer and json.dumps(name, ensure_ascii=False)[1:-1] not in answer:
                raise RowDropped(NO_CALLS)


def _written(conversation: Conversation, text: str, turns: Sequence[Turn]) -> dict[int, str]:
    """The rendering of each answer, by message index."""
    written = {index: "" for index, message in enumerate(conversation.messages) if message["role"] == "assistant"}
    for turn in turns:
        written[turn.message] += text[turn.start : turn.end]
    return written


def _left_out(content: str, written: str) -> bool:
    """Whether a text was omitted; checks three of its words, since a template may trim or rewrite it."""
    if content in written:
        return False
    words = _TAG.sub(" ", content).split()
    return bool(words) and not any(word in written for word in (words[0], words[-1], max(words, key=len)))


def _chosen(
    turns: Sequence[Turn], conversation: Conversation, written: Mapping[int, str], train_on: str
) -> tuple[Turn, ...]:
    """Set ``trained``: flags in the row override ``method.train_on``, but ``last`` trains no earlier turn."""

    def is_trained(turn: Turn) -> bool:
        asked = train_on != "last" or turn.message == turns[-1].message
        message = conversation.messages[turn.message]
        asked = asked and not turn.vague and conversation.train[turn.message] is not False
        return asked and not _is_empty(message, written[turn.message])

    return tuple([turn._replace(trained=True) if is_trained(turn) else turn for turn in turns])


def _is_empty(message: Mapping[str, Any], written: str) -> bool:
    """Whether a message has no text, reasoning or tool call in the rendering."""
    if message.get("tool_calls") or message.get("reasoning_content"):
        return False
    return not message["content"].strip() or _left_out(message["content"], written)
