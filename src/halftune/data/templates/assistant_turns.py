"""Finds the assistant turns in a rendered conversation by comparing renderings.

The turn of message *i* begins where the rendering of the messages before it, with the generation prompt, ends. It ends
where the rendering of the messages up to it ends. Many templates break these prefixes: they render a turn differently
if more turns follow, move the system message to the last question, or add text to the generation prompt. Then answers
are found by content (``message_placeholders.py``), and only their surroundings are compared: the end of the prompt,
after the last text before the answer, and what follows the answer's last text in the rendering that ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from halftune.data.formats.conversation import RowDropped
from halftune.data.templates.message_placeholders import (
    PLACEHOLDER,
    TextSpan,
    message_of,
    render_placeholders,
    text_spans,
    with_placeholders,
)
from halftune.data.templates.render import ChatTemplate, shared

LOST = "cannot compute the loss mask: the chat template rewrites this conversation"

Messages = Sequence[Mapping[str, Any]]


class Turn(NamedTuple):  # a frozen dataclass takes four times as long to make
    """An assistant turn in the rendering, in characters. A template may split one message into several turns.

    Attributes:
        message: index of the message.
        start, end: the text that the model generates, end-of-turn token included.
        full_end: end of the turn, e.g. after the line break that follows the end-of-turn token.
        complete: whether the turn ends with an end-of-turn token.
        trained: whether its tokens have labels.
        vague: whether its start is not known: it is somewhere after ``start``.
    """

    message: int
    start: int
    end: int
    full_end: int
    complete: bool
    trained: bool = False
    vague: bool = False


def by_prefix(
    template: ChatTemplate, messages: Messages, tools: Any, answers: Sequence[int], whole: str
) -> tuple[list[Turn] | None, bool]:
    """The turns of the messages ``answers``; None if the template breaks a prefix.

    The second value says whether the template is known to render a turn differently if more turns follow.
    """
    turns, end = list[Turn](), 0
    for group in filter(None, (answers[:1], answers[1:])):  # the first answer shows most broken prefixes
        throughs = _by_length(template, messages, tools, {index + 1 for index in group} - {len(messages)})
        ends = [throughs(index + 1) if index + 1 < len(messages) else whole for index in group]
        if not all(map(whole.startswith, ends)):
            return None, True
        prompts = _by_length(template, messages, tools, set(group) - {0}, prompt=True)
        for index, through in zip(group, ends, strict=True):
            openings = [prompts(index)] if index else template.headers  # there is no prompt before the first message
            start = next((len(opening) for opening in openings if whole.startswith(opening)), -1)
            if start < end:
                return None, False
            if len(through) <= start:
                return None, True
            turns.append(_closed(template, index, whole, start, len(through)))
            end = turns[-1].end
    return turns, False


def _by_length(
    template: ChatTemplate, messages: Messages, tools: Any, lengths: set[int], *, prompt: bool = False
) -> Callable[[int], str]:
    """Renders the first messages of a conversation, by their number, which is one of ``lengths``."""
    if not lengths:
        return {}.__getitem__
    ordered = sorted(lengths)
    rendered = template.render_all([messages[:length] for length in ordered], tools, prompt=prompt)
    return lambda length: rendered(ordered.index(length))


def _closed(template: ChatTemplate, message: int, whole: str, start: int, full_end: int) -> Turn:
    """A turn cut after its end-of-turn token: the model does not generate what the template adds behind it."""
    control, ends = template.control, template.end_tokens
    body = whole[start:full_end].rstrip()
    if body and control.is_alias(body[-1]):
        tail = len(body)
        while tail and (body[tail - 1].isspace() or control.is_alias(body[tail - 1])):
            tail -= 1
        first = next((place for place in range(tail, len(body)) if body[place] in ends), len(body) - 1)
        while body[first + 1 : first + 2] in ends:  # the end of an answer, and that of its turn
            first += 1
        return Turn(message, start, start + first + 1, full_end, complete=True)
    # Some templates close every turn except the last.
    rest = whole[full_end:].lstrip()
    closing = len(rest) - len(rest.lstrip("".join(ends)))
    end = len(whole) - len(rest) + closing if closing else full_end
    return Turn(message, start, end, end, complete=closing > 0)


def by_content(template: ChatTemplate, messages: Messages, tools: Any, whole: str) -> list[Turn]:
    """Find the turns of all answers by their content.

    Raises:
        RowDropped: the starts of all turns are ambiguous.
    """
    replaced = with_placeholders(template, messages)
    other = render_placeholders(template, replaced, tools, whole)
    if other is None:
        raise RowDropped(LOST)
    turns, answers = [], _answers(text_spans(other, replaced), messages, len(other))
    prompts = _by_length(template, replaced, tools, {answer.asked for answer in answers} - {0}, prompt=True)
    ending = {answer.until for answer in answers if not _closes(template, messages, other, answer)}
    throughs = _by_length(template, replaced, tools, ending)
    for answer in answers:
        try:
            start = _start(template, other, answer.span, answer.before, prompts(answer.asked) if answer.asked else None)
        except RowDropped:
            first, end = answer.before.end if answer.before else 0, answer.span.end
            turns.append(Turn(answer.span.message, first, end, end, complete=True, vague=True))
            continue
        if _closes(template, messages, other, answer):
            turns.append(_closed(template, answer.span.message, other, start, answer.span.end))
        else:
            through = throughs(answer.until) if answer.until < len(messages) else other
            turns.append(_ended(template, through, other, answer.span, start, answer.limit))
    if turns and all(turn.vague for turn in turns):
        raise RowDropped(LOST)
    return turns


@dataclass(frozen=True)
class _Answer:
    """An assistant text in a rendering, the text before it, and the start of the next text."""

    span: TextSpan
    before: TextSpan | None
    limit: int

    @property
    def asked(self) -> int:
        """Number of messages in the prompt of this answer."""
        if not self.before or self.before.message < self.span.message:
            return self.span.message
        return self.before.message + 1

    @property
    def until(self) -> int:
        """Number of messages in the conversation that ends with this answer."""
        return max(self.span.message, self.before.message if self.before else 0) + 1


def _answers(found: Sequence[TextSpan], messages: Messages, length: int) -> list[_Answer]:
    """The assistant texts among the texts of a rendering of ``length`` characters."""
    limits = [*(span.start for span in found[1:]), length]
    neighbours = zip(found, (None, *found), limits, strict=False)
    return [_Answer(*parts) for parts in neighbours if messages[parts[0].message]["role"] == "assistant"]


def _closes(template: ChatTemplate, messages: Messages, other: str, answer: _Answer) -> bool:
    """Whether an end-of-turn token directly follows a text that is not the last."""
    rest = other[answer.span.end : answer.limit].lstrip()
    called = messages[answer.span.message].get("tool_calls")
    return answer.until < len(messages) and rest[:1] in template.end_tokens and not called


def _start(template: ChatTemplate, other: str, span: TextSpan, before: TextSpan | None, prompt: str | None) -> int:
    """Start of a turn: after the part of the prompt that follows the last text."""
    first = before.end if before else 0
    between, lead, same = other[first : span.start], "", 0
    if prompt is not None:
        lead = prompt[prompt.rfind(other[before.end - 1]) + 1 if before else 0 :]
        same = shared(lead, between)
        if same == len(lead):
            return first + same
    for header in template.headers:
        if header in between:
            return first + between.rindex(header) + len(header)
    if prompt is not None and (same == len(between) or lead.endswith(between)):
        return span.start
    return first + _lead_end(template, lead, between, same)


def _lead_end(template: ChatTemplate, lead: str, between: str, same: int) -> int:
    """Where the prompt's text ``lead`` ends in ``between``, except a thinking block and white space.

    Args:
        same: length of the common prefix of both.
    """
    # What only the prompt contains is a thinking block, which may begin like the answer.
    same = min([same, *(tag.start() for tag in template.literals.finditer(lead) if tag.start() < same < tag.end())])
    if template.literals.match(lead, same):
        return same
    words = r"\s+".join(map(re.escape, lead.split()))
    if words and (match := re.search(words, between)):
        return match.end()
    raise RowDropped(LOST)


def _ended(template: ChatTemplate, through: str, other: str, span: TextSpan, start: int, limit: int) -> Turn:
    """The turn with its end: the common prefix with the rendering of the conversation that ends with it."""
    following = other[span.end : limit]
    tail, same = "", 0
    for one in _tails(through, other, span):
        if (length := shared(one, following)) >= same:
            tail, same = one, length
        if same == len(one):
            break
    turn = _closed(template, span.message, other, start, span.end + same)
    if turn.complete or same == len(tail):
        return turn
    # Only the end of a last turn differs here.
    return _closed(template, span.message, other, start, span.end + len(following[:same].rstrip()))


def _tails(through: str, other: str, span: TextSpan) -> Iterator[str]:
    """Text after a span in another rendering: after its last occurrence, and after the one with the same index."""
    placeholder = other[span.end - 1]
    yield from _tail(through, through.rfind(placeholder) + 1, span)
    words = re.compile(f"{placeholder}+")
    number = sum(1 for _ in words.finditer(other, 0, span.end))
    same = next(islice(words.finditer(through), number - 1, None), None)
    yield from _tail(through, same.end() if same else 0, span)


def _tail(through: str, end: int, span: TextSpan) -> Iterator[str]:
    """Text after an occurrence that ends at ``end``; nothing for 0, or if the next message follows at once."""
    following = PLACEHOLDER.search(through, end)
    # the next message's header is not part of the end
    if end and (following is None or message_of(following[0]) == span.message):
        yield through[end : following.start() if following else None]
