"""In which form a chat template takes what rows bring: found once for each template, by short probes."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from halftune.data.conversation import Conversation, RowDropped

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
SPLIT = "parallel tool calls became one call a turn, as the chat template takes no more"
MADE_IDS = "tool calls got ids, as the chat template asks for them"
MERGED_SYSTEM = "the system message was put in front of the first question"
NO_SYSTEM = "the chat template takes no system message"
_LETTERS = string.ascii_letters + string.digits
_LONG = "call_Zq8halftuneZq8"  # as long as those of OpenAI
_SHORT = "Zq8idZq80"
_ASK, _SAY, _THINK, _SYSTEM = (f"Zq{word} halftune {word}qZ" for word in ("asks", "says", "thinks", "orders"))
_NAME, _VALUE = "zq_probe", "Zqvalue halftune"
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
class Forms:
    """What a chat template takes.

    Attributes:
        parts: contents are lists of parts, as in the first vision templates, and not texts.
        reasoning: the key of an assistant's reasoning; None where the template has no place for it.
        text_arguments: arguments of a tool call are JSON text, and not an object.
        ids_asked: tool calls without an id are refused.
        short_ids: ids are nine letters or digits.
        one_call: a turn holds one tool call.
        system: whether a system message is shown.
        system_refused: whether a conversation with one is refused.
    """

    parts: bool = False
    reasoning: str | None = None
    text_arguments: bool = False
    ids_asked: bool = False
    short_ids: bool = False
    one_call: bool = False
    system: bool = True
    system_refused: bool = False

    def of_message(self, message: Message) -> dict[str, Any]:
        """A message as the template takes it."""
        made = dict(message)
        if self.reasoning is not None and "reasoning_content" in made:
            made[self.reasoning] = made.pop("reasoning_content")
        if self.parts:
            made["content"] = [{"type": "text", "text": made["content"]}]
        if self.text_arguments and made.get("tool_calls"):
            made["tool_calls"] = [
                {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
                for call in made["tool_calls"]
                for function in [call["function"]]
            ]
        return made

    def of_conversation(self, made: Conversation) -> Conversation:
        """A conversation with the ids and the number of tool calls a turn that the template takes."""
        if not any(message.get("tool_calls") for message in made.messages):
            return made
        if self.ids_asked or self.short_ids:
            made = _with_ids(made, short=self.short_ids)
        return _one_call_a_turn(made) if self.one_call else made


def find_forms(render: Callable[[Forms, Sequence[Message], Any], str]) -> Forms:
    """Finds the forms of a template.

    Args:
        render: renders messages and tools in given forms. Raises RowDropped where the template refuses them.
    """

    def shows(forms: Forms, messages: Sequence[Message], *texts: str, tools: Any = None) -> bool:
        try:
            rendered = render(forms, messages, tools)
        except RowDropped:
            return False
        return all(text in rendered for text in texts)

    forms, turn = Forms(), [_QUESTION, _ANSWER]
    if not shows(forms, turn, _ASK, _SAY) and shows(replace(forms, parts=True), turn, _ASK, _SAY):
        forms = replace(forms, parts=True)
    ordered = [{"role": "system", "content": _SYSTEM}, *turn]
    if shows(forms, turn) and not shows(forms, ordered, _SYSTEM):
        forms = replace(forms, system=False, system_refused=not shows(forms, ordered))
    forms = _of_tools(forms, shows)
    thinking = [_QUESTION, {**_ANSWER, "reasoning_content": _THINK}]
    calling = [
        {**message, "reasoning_content": _THINK} if "tool_calls" in message else message for message in _called(_SHORT)
    ]
    for key in REASONING_KEYS:
        taken = replace(forms, reasoning=key)
        if shows(taken, thinking, _THINK) or shows(taken, calling, _THINK, tools=[TOOL]):
            return taken
    return forms


def _of_tools(forms: Forms, shows: Callable[..., bool]) -> Forms:
    for text in (False, True):
        forms = replace(forms, text_arguments=text)
        taken = {
            given: shows(forms, _called(given), _NAME, f'"{_VALUE}"', tools=[TOOL]) for given in ("", _LONG, _SHORT)
        }
        if not any(taken.values()):  # perhaps it writes no JSON; then an object must not come out as Python writes it
            taken = {
                given: shows(forms, _called(given), _NAME, _VALUE, tools=[TOOL])
                and not shows(forms, _called(given), repr({"zq": _VALUE}), tools=[TOOL])
                for given in taken
            }
        if any(taken.values()):
            forms = replace(forms, ids_asked=not taken[""], short_ids=not taken[_LONG] and taken[_SHORT])
            given = "" if taken[""] else _SHORT
            single = not shows(forms, _called(given, given and "Zq8idZq81"), _VALUE, tools=[TOOL])
            return replace(forms, one_call=single)
    return replace(forms, text_arguments=False)


def _called(*ids: str) -> list[Message]:
    """A conversation with one tool call for each id; "" is none."""
    calls, results = [], []
    for given in ids:
        call = {"type": "function", "function": {"name": _NAME, "arguments": {"zq": _VALUE}}}
        calls.append({"id": given, **call} if given else call)
        result = {"role": "tool", "name": _NAME, "content": "four"}
        results.append({**result, "tool_call_id": given} if given else result)
    return [_QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *results, _ANSWER]


def merge_system(made: Conversation) -> Conversation:
    """Puts the system message in front of the first question.

    Raises:
        RowDropped: no question follows it.
    """
    first, *others = made.messages
    if not others or others[0]["role"] != "user":
        raise RowDropped(f"{NO_SYSTEM}, and no question follows it")
    question = {**others[0], "content": f"{first['content']}\n\n{others[0]['content']}"}
    return Conversation([question, *others[1:]], made.tools, made.train[1:], (*made.notes, MERGED_SYSTEM))


def _with_ids(made: Conversation, *, short: bool) -> Conversation:
    """Every tool call and result with an id; the same for the same calls, and as random as a server's."""
    messages, renamed, waiting, changed = [], dict[str, str](), list[str](), False
    for place, message in enumerate(made.messages):
        if message.get("tool_calls"):
            calls, waiting = [], []
            for number, call in enumerate(message["tool_calls"]):
                given = call.get("id", "")
                new = given if given and (_fits(given) or not short) else _made_id(place, number, call["function"])
                changed = changed or new != given
                renamed[given] = new
                waiting.append(new)
                calls.append({"id": new, **{key: value for key, value in call.items() if key != "id"}})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id", "")
            following = waiting.pop(0) if waiting else _made_id(place, 0, {})
            message = {**message, "tool_call_id": renamed.get(given, following) if given else following}
        messages.append(message)
    return replace(made, messages=messages, notes=(*made.notes, MADE_IDS) if changed else made.notes)


def _fits(given: str) -> bool:
    return len(given) == 9 and all(letter in _LETTERS for letter in given)


def _made_id(place: int, number: int, function: Message) -> str:
    """Nine letters and digits."""
    digest = hashlib.sha256(json.dumps([place, number, function], sort_keys=True).encode()).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])


def _one_call_a_turn(made: Conversation) -> Conversation:
    """Each of several calls of a turn in a turn of its own, its result behind it; unchanged where one is missing."""
    messages, train, position, split = list[dict[str, Any]](), list[bool | None](), 0, False
    while position < len(made.messages):
        message, wish = made.messages[position], made.train[position]
        calls = message.get("tool_calls") or []
        results = made.messages[position + 1 : position + 1 + len(calls)]
        position += 1
        if len(calls) < 2 or len(results) < len(calls) or any(result["role"] != "tool" for result in results):
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
            train += [wish, made.train[position + number]]
        position += len(calls)
    return replace(made, messages=messages, train=tuple(train), notes=(*made.notes, SPLIT)) if split else made


def _in_order(calls: Sequence[Message], results: Sequence[Message]) -> list[Message]:
    """The results in the order of the calls, by their ids where all have one."""
    by_id = {result.get("tool_call_id"): result for result in results}
    wanted = [call.get("id") for call in calls]
    return (
        [by_id[given] for given in wanted] if set(wanted) == set(by_id) and len(by_id) == len(calls) else list(results)
    )
