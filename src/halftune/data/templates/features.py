"""Detects how a chat template expects messages and tool calls, with short probe renderings once per template."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from halftune.data.formats.conversation import DEVELOPER, Conversation, RowDropped

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
SPLIT = "parallel tool calls split into one call per turn (the chat template supports one)"
NO_PARALLEL = "the chat template supports one tool call per turn; parallel tool calls without results cannot be split"
MADE_IDS = "generated tool call ids (the chat template requires them)"
MERGED_SYSTEM = "system message merged into the first user message"
NO_CALLS = "the chat template does not support tool calls"
WITH_TOOLS = "set model.chat_template to a template with tools (chatml, qwen2.5, qwen3)"
NO_SYSTEM = "the chat template does not support system messages"
_LETTERS = string.ascii_letters + string.digits
_LONG = "call_Zq8halftuneZq8"  # the length of OpenAI's ids
_SHORT = "Zq8idZq80"
_ASK, _SAY, _THINK, _SYSTEM = (f"Zq{word} halftune {word}qZ" for word in ("asks", "says", "thinks", "orders"))
_NAME, _VALUE, _NEXT = "zq_probe", "Zqvalue halftune", "Zqnext halftune"
TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"zq": {"type": "string", "description": "A text."}},
            "required": ["zq"],
        },
    },
}
_QUESTION, _ANSWER = {"role": "user", "content": _ASK}, {"role": "assistant", "content": _SAY}

Message = Mapping[str, Any]


@dataclass(frozen=True)
class TemplateFeatures:
    """What a chat template supports and requires.

    Attributes:
        content_parts: content is a list of parts instead of text.
        reasoning: message key of reasoning; None if the template ignores reasoning.
        string_arguments: arguments of a tool call are a JSON string instead of an object.
        ids_required: tool calls without an id are rejected.
        short_ids: ids must be nine letters or digits.
        one_call: at most one tool call per turn.
        system: whether system messages are rendered.
        system_rejected: whether system messages are rejected.
        developer: whether the template names the role ``developer`` and shows such a message.
    """

    content_parts: bool = False
    reasoning: str | None = None
    string_arguments: bool = False
    ids_required: bool = False
    short_ids: bool = False
    one_call: bool = False
    system: bool = True
    system_rejected: bool = False
    developer: bool = False

    def of_message(self, message: Message) -> dict[str, Any]:
        """The message with the keys and types that the template expects."""
        made = dict(message)
        if made.pop(DEVELOPER, False) and self.developer:
            made["role"] = "developer"
        if self.reasoning is not None and "reasoning_content" in made:
            made[self.reasoning] = made.pop("reasoning_content")
        if self.content_parts:
            made["content"] = [{"type": "text", "text": made["content"]}]
        if self.string_arguments and made.get("tool_calls"):
            made["tool_calls"] = [
                {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
                for call in made["tool_calls"]
                for function in [call["function"]]
            ]
        return made

    def of_conversation(self, made: Conversation) -> Conversation:
        """The conversation with valid tool call ids and a supported number of tool calls per turn.

        Raises:
            RowDropped: the template supports one call per turn, and parallel calls have no results.
        """
        if not any(message.get("tool_calls") for message in made.messages):
            return made
        if self.ids_required or self.short_ids:
            made = _with_ids(made, short=self.short_ids)
        return _one_call_a_turn(made) if self.one_call else made


def probe_features(
    render: Callable[[TemplateFeatures, Sequence[Message], Any], str], *, names_developer: bool = False
) -> TemplateFeatures:
    """Detect a template's features by probing.

    Args:
        render: renders messages and tools for given features. Raises RowDropped if the template rejects them.
        names_developer: whether the template's source has the word ``developer``.
    """

    def shows(features: TemplateFeatures, messages: Sequence[Message], *texts: str, tools: Any = None) -> bool:
        try:
            rendered = render(features, messages, tools)
        except RowDropped:
            return False
        return all(text in rendered for text in texts)

    features, turn = TemplateFeatures(), [_QUESTION, _ANSWER]
    parts = replace(features, content_parts=True)
    in_python = shows(parts, turn, f"'text': '{_ASK}'")  # the list itself was written, not its text
    if not shows(features, turn, _ASK, _SAY) and shows(parts, turn, _ASK, _SAY) and not in_python:
        features = parts
    ordered = [{"role": "system", "content": _SYSTEM}, *turn]
    if shows(features, turn) and not shows(features, ordered, _SYSTEM):
        features = replace(features, system=False, system_rejected=not shows(features, ordered))
    instructed = [{"role": "system", "content": _SYSTEM, DEVELOPER: True}, *turn]
    known = replace(features, developer=True)
    if names_developer and shows(known, instructed, _SYSTEM):
        features = known
    return _of_reasoning(_of_tools(features, shows), shows)


def _of_reasoning(features: TemplateFeatures, shows: Callable[..., bool]) -> TemplateFeatures:
    thinking = [_QUESTION, {**_ANSWER, "reasoning_content": _THINK}]
    calling = [
        {**message, "reasoning_content": _THINK} if "tool_calls" in message else message
        for message in _tool_conversation(_SHORT)
    ]
    for key in REASONING_KEYS:
        taken = replace(features, reasoning=key)
        if shows(taken, thinking, _THINK) or shows(taken, calling, _THINK, tools=[TOOL]):
            return taken
    return features


def _of_tools(features: TemplateFeatures, shows: Callable[..., bool]) -> TemplateFeatures:
    for text in (False, True):
        features = replace(features, string_arguments=text)
        taken = {
            given: shows(features, _tool_conversation(given), _NAME, f'"{_VALUE}"', tools=[TOOL])
            for given in ("", _LONG, _SHORT)
        }
        if not any(taken.values()):  # maybe it renders no JSON; then an object must not be rendered as a Python repr
            taken = {
                given: shows(features, _tool_conversation(given), _NAME, _VALUE, tools=[TOOL])
                and not shows(features, _tool_conversation(given), repr({"zq": _VALUE}), tools=[TOOL])
                for given in taken
            }
        if any(taken.values()):
            features = replace(features, ids_required=not taken[""], short_ids=not taken[_LONG] and taken[_SHORT])
            given = "" if taken[""] else _SHORT
            both = _tool_conversation(given, given and "Zq8idZq81")
            single = not shows(features, both, _VALUE, _NEXT, tools=[TOOL])
            return replace(features, one_call=single)
    return replace(features, string_arguments=False)


def _tool_conversation(*ids: str) -> list[Message]:
    """A conversation with one tool call per id, at most two; "" means no id."""
    calls, results = [], []
    for given, value in zip(ids, (_VALUE, _NEXT), strict=False):
        call = {"type": "function", "function": {"name": _NAME, "arguments": {"zq": value}}}
        calls.append({"id": given, **call} if given else call)
        result = {"role": "tool", "name": _NAME, "content": "four"}
        results.append({**result, "tool_call_id": given} if given else result)
    return [_QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *results, _ANSWER]


def without_system(made: Conversation) -> Conversation:
    """Leave out the system message."""
    if made.messages[0]["role"] != "system" or len(made.messages) == 1:
        return made
    return replace(made, messages=made.messages[1:], train=made.train[1:])


def fit_system(made: Conversation, features: TemplateFeatures, *, merge: bool) -> Conversation:
    """The conversation as a template with these features can render it.

    Args:
        made: a conversation.
        features: of the chat template.
        merge: put a system message that is not supported before the first user message.

    Raises:
        RowDropped: the template refuses system messages; or no user message follows.
    """
    if made.messages[0]["role"] != "system" or features.system:
        return made
    if not merge and features.system_rejected:
        raise RowDropped(NO_SYSTEM)
    if not merge:
        return made
    first, *others = made.messages
    if not others or others[0]["role"] != "user":
        raise RowDropped(f"{NO_SYSTEM}, and no user message follows")
    question = {**others[0], "content": f"{first['content']}\n\n{others[0]['content']}"}
    return replace(made, messages=[question, *others[1:]], train=made.train[1:], notes=(*made.notes, MERGED_SYSTEM))


def _with_ids(made: Conversation, *, short: bool) -> Conversation:
    """Add an id to every tool call and result; deterministic, but looks random."""
    messages, renamed, waiting = [], dict[str, str](), list[str]()
    for place, message in enumerate(made.messages):
        if message.get("tool_calls"):
            calls, waiting = [], []
            for number, call in enumerate(message["tool_calls"]):
                new = _fitting_id(call, place, number, short=short)
                renamed[call.get("id", "")] = new
                waiting.append(new)
                calls.append({"id": new} | call | {"id": new})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id", "")
            following = waiting.pop(0) if waiting else _made_id(place, 0, {})
            message = {**message, "tool_call_id": renamed.get(given, following) if given else following}
        messages.append(message)
    changed = any(given != new for given, new in renamed.items())
    return replace(made, messages=messages, notes=(*made.notes, MADE_IDS) if changed else made.notes)


def _fitting_id(call: Message, place: int, number: int, *, short: bool) -> str:
    """The call's own id if the template accepts it, else a made one."""
    given = call.get("id", "")
    return given if given and (_fits(given) or not short) else _made_id(place, number, call["function"])


def _fits(given: str) -> bool:
    return len(given) == 9 and all(letter in _LETTERS for letter in given)  # as Mistral's templates demand


def _made_id(place: int, number: int, function: Message) -> str:
    """Nine letters and digits."""
    digest = hashlib.sha256(json.dumps([place, number, function], sort_keys=True).encode()).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])


def _one_call_a_turn(made: Conversation) -> Conversation:
    """Split parallel calls into one turn per call, followed by its result.

    Raises:
        RowDropped: a result is missing.
    """
    messages, train, position, split = list[dict[str, Any]](), list[bool | None](), 0, False
    while position < len(made.messages):
        message, wish = made.messages[position], made.train[position]
        calls = message.get("tool_calls") or []
        results, length = _results(made.messages[position + 1 :], len(calls))
        position += 1
        if len(results) < len(calls) > 1:
            raise RowDropped(NO_PARALLEL)
        if len(calls) < 2:
            messages.append(message)
            train.append(wish)
            continue
        split = True
        for number, (call, result) in enumerate(zip(calls, _in_order(calls, results), strict=True)):
            alone = (
                {**message, "tool_calls": [call]}
                if not number
                else {"role": "assistant", "content": "", "tool_calls": [call]}
            )
            messages += [alone, result]
            train += [wish, made.train[position + min(number, length - 1)]]
        position += length
    return replace(made, messages=messages, train=tuple(train), notes=(*made.notes, SPLIT)) if split else made


def _results(following: Sequence[Message], calls: int) -> tuple[list[Message], int]:
    """The results of ``calls`` tool calls and the number of messages with them: one each, or one with a JSON list."""
    results = list(takewhile(lambda message: message["role"] == "tool", following[:calls]))
    if len(results) != 1 or calls < 2:
        return results, len(results)
    try:
        parts = json.loads(results[0]["content"])
    except ValueError:
        return results, 1
    if not isinstance(parts, list) or len(parts) != calls:
        return results, 1
    texts = [part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts]
    return [{**results[0], "content": text} for text in texts], 1


def _in_order(calls: Sequence[Message], results: Sequence[Message]) -> list[Message]:
    """The results in the order of the calls, matched by id if all have one."""
    by_id = {result.get("tool_call_id"): result for result in results}
    wanted = [call.get("id") for call in calls]
    return (
        [by_id[given] for given in wanted] if set(wanted) == set(by_id) and len(by_id) == len(calls) else list(results)
    )
