"""Finds the assistant's turns in a rendered conversation, by comparing renderings.

The turn of message *i* begins where the rendering of the messages before it, with the header of an answer, ends; it
ends where the rendering of the messages up to it ends. Many templates break these prefixes: they write a turn
differently once more turns follow, move the system message to the last question, or put into the prompt what the
conversation has not. Then the answers are found by their content (``stain.py``), and only what stands around each is
compared: what a prompt ends with, behind the last text before the answer, and what follows the answer's last text in
the rendering that ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halftune.data.chat import ChatTemplate, shared
from halftune.data.conversation import RowDropped
from halftune.data.stain import INK, Run, owner, runs, stained, trace

LOST = "the loss mask cannot be found: the chat template rewrites this conversation"

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Turn:
    """An assistant's turn in the rendering, in characters. A template may write one in several pieces.

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


def by_prefix(
    template: ChatTemplate, messages: Messages, tools: Any, answers: Sequence[int], whole: str
) -> tuple[list[Turn] | None, bool]:
    """The turns of the messages ``answers`` in their rendering; None where the template breaks a prefix.

    Also whether it writes a turn differently once more turns follow, as far as this was looked for.
    """
    turns: list[Turn] = []
    for index in answers:
        if index == 0:  # no prompt comes before it
            start = next((len(header) for header in template.headers if whole.startswith(header)), -1)
        else:
            prompt = template.render(messages[:index], tools, prompt=True)
            start = len(prompt) if whole.startswith(prompt) else -1
        if start < (turns[-1].end if turns else 0):
            return None, False
        through = whole if index == len(messages) - 1 else template.render(messages[: index + 1], tools)
        if not whole.startswith(through) or len(through) <= start:
            return None, True
        turns.append(_closed(template, index, whole, start, len(through)))
    return turns, False


def _closed(template: ChatTemplate, message: int, whole: str, start: int, full_end: int) -> Turn:
    """A turn that ends with its end-of-turn token: what the template writes behind it is not for the model to write."""
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
    # Some templates close every turn but the last one.
    rest = whole[full_end:].lstrip()
    closing = len(rest) - len(rest.lstrip("".join(ends)))
    end = len(whole) - len(rest) + closing if closing else full_end
    return Turn(message, start, end, end, complete=closing > 0)


def by_content(template: ChatTemplate, messages: Messages, tools: Any, whole: str) -> list[Turn]:
    """The turns of all answers that show in the rendering.

    Raises:
        RowDropped: they cannot be told for certain.
    """
    covered = stained(template, messages)
    other = trace(template, covered, tools, whole)
    if other is None:
        raise RowDropped(LOST)
    found, turns = runs(other, covered), []
    for place, run in enumerate(found):
        if messages[run.message]["role"] != "assistant":
            continue
        before = found[place - 1] if place else None
        limit = found[place + 1].start if place + 1 < len(found) else len(other)
        start = _start(template, covered, tools, other, run, before)
        until = max(run.message, before.message if before else 0) + 1
        rest = other[run.end : limit].lstrip()
        if until == len(messages):
            turns.append(_ended(template, other, other, run, start, limit))
        elif rest[:1] in template.end_tokens and not messages[run.message].get("tool_calls"):
            turns.append(_closed(template, run.message, other, start, run.end))
        else:
            through = template.render(covered[:until], tools)
            turns.append(_ended(template, through, other, run, start, limit))
    return turns


def _start(template: ChatTemplate, covered: Messages, tools: Any, other: str, run: Run, before: Run | None) -> int:
    """Where a turn begins: behind what a prompt writes after the last text."""
    first = before.end if before else 0
    until = run.message if not before or before.message < run.message else before.message + 1
    between, lead, same = other[first : run.start], "", 0
    if until:
        prompt = template.render(covered[:until], tools, prompt=True)
        lead = prompt[prompt.rfind(other[before.end - 1]) + 1 if before else 0 :]
        same = shared(lead, between)
        if same == len(lead):
            return first + same
    for header in template.headers:
        if header in between:
            return first + between.rindex(header) + len(header)
    if until and (same == len(between) or lead.endswith(between)):
        return run.start
    # What the prompt has and the conversation has not is a block of thought; it may begin as the answer does.
    same = min([same, *(tag.start() for tag in template.literals.finditer(lead) if tag.start() < same < tag.end())])
    if template.literals.match(lead, same):
        return first + same
    words = r"\s+".join(map(re.escape, lead.split()))  # the same but for white space
    if words and (match := re.search(words, between)):
        return first + match.end()
    raise RowDropped(LOST)


def _ended(template: ChatTemplate, through: str, other: str, run: Run, start: int, limit: int) -> Turn:
    """The turn up to where it ends: as far as the rendering that ends with it goes on as the conversation does."""
    following = other[run.end : limit]
    tail, same = "", 0
    for one in _tails(through, other, run):
        if (length := shared(one, following)) >= same:
            tail, same = one, length
        if same == len(one):
            break
    turn = _closed(template, run.message, other, start, run.end + same)
    if turn.complete or same == len(tail):
        return turn
    # Only what closes a last turn goes on differently here.
    return _closed(template, run.message, other, start, run.end + len(following[:same].rstrip()))


def _tails(through: str, other: str, run: Run) -> Iterator[str]:
    """What follows a run's text in another rendering: its last text there, and its text of the same number."""
    ink = other[run.end - 1]
    words = re.compile(f"{ink}+")
    number = sum(1 for _ in words.finditer(other, 0, run.end))
    ends = [match.end() for match in words.finditer(through)]
    for place in (len(ends) - 1, number - 1):
        if 0 <= place < len(ends):
            following = INK.search(through, ends[place])
            if following is None or owner(following[0]) == run.message:  # another's header is no end
                yield through[ends[place] : following.start() if following else None]
