"""Whether the headers of a chat template tell an answer from other texts, and agree with the generation prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from halftune.data.formats.conversation import Conversation, RowDropped
from halftune.data.templates.control_tokens import is_content
from halftune.data.templates.features import fit_system
from halftune.data.templates.render import ChatTemplate, shared

OTHER_PROMPT = "the generation prompt differs from the header of answers"
OPENS_THOUGHT = "the generation prompt opens a thought, which answers without reasoning do not have"
IN_ANSWER = "a {} message has the header of an answer"
_THOUGHT = re.compile(r"</?think>")


def parts_of(message: Mapping[str, Any]) -> list[str]:
    """The thought in a text, and what follows it."""
    return [part.strip() for part in _THOUGHT.split(message["content"]) if part.strip()]


def header_faults(template: ChatTemplate, row: dict[str, Any]) -> Iterator[str]:
    """Name what is wrong with the headers of a conversation that ends with an answer."""
    messages, tools = row["messages"], row.get("tools")
    conversation = Conversation(messages=messages, train=(None,) * len(messages), tools=tools)
    try:
        messages = template.features.of_conversation(fit_system(conversation, template.features, merge=False)).messages
        read = template.control.readable
        whole = read(template.render(messages, tools))
        asked, before = (read(template.render(messages[:-1], tools, prompt=prompt)) for prompt in (True, False))
    except RowDropped:
        return
    question, answer = messages[-2]["content"].strip(), parts_of(messages[-1])[0]
    opening, _, _ = whole.rpartition(answer)
    prompt, header = asked.rpartition(question)[2], opening.rpartition(question)[2]
    if question not in asked or question not in opening or not prompt.strip():
        return
    same = shared(prompt, header)
    if not header.startswith(prompt):
        more = prompt[len(header.rstrip()) :]
        extended = prompt.startswith(header.rstrip())
        if not extended or not is_content(more):
            yield OTHER_PROMPT
            return
        yield OPENS_THOUGHT
    # Without the end of the question, and a thought that the prompt opens.
    own = prompt[shared(prompt[:same], before.rpartition(question)[2]) : same].partition("<think")[0].strip()
    if own:
        yield from _in_answers(whole, messages, own)


def _in_answers(whole: str, messages: list[dict[str, Any]], header: str) -> Iterator[str]:
    """Texts of others behind the header of an answer; nothing if a text is not where it should be."""
    end = 0
    for message in messages:
        said = message["content"].strip()
        calls = [one["function"]["arguments"].values() for one in message.get("tool_calls", ())]
        for text in filter(None, (said.rpartition("</think>")[2].strip(), *(one for call in calls for one in call))):
            if (start := whole.find(text, end)) < 0:
                return
            if message["role"] != "assistant" and header in whole[end:start]:
                yield IN_ANSWER.format(message["role"])
            end = start + len(text)
