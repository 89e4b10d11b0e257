"""Conversations that clients send and probes may not hold: several turns, a system text, tools, odd characters."""

from __future__ import annotations

from typing import Any

from halftune.verify.draw import render
from halftune.verify.probes import Probe, Probes

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": _CITY}}]
_CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
_FIRST = {"role": "user", "content": "Which city?"}
_ASKED = [_FIRST, {"role": "assistant", "content": "Bern."}, {"role": "user", "content": "Its weather?"}]
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "12 degrees"}
_ODD = {"role": "user", "content": "é Ａ 12345  x\n\n\tif a:\n🙂 "}
_ALL: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    (_ASKED, None),
    ([{"role": "system", "content": "Be brief."}, *_ASKED, {"role": "assistant", "content": "Mild."}, _ODD], None),
    ([_FIRST], _TOOLS),
    ([*_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, _RESULT], _TOOLS),
]


def conversations(probes: Probes, tokenizer: Any) -> list[Probe]:
    """Further prompts, without answers; those that the result's own template refuses, or whose tools it drops, are not
    among them.

    Args:
        probes: of the result.
        tokenizer: of the result.
    """
    found = []
    for messages, tools in _ALL if tokenizer.chat_template else ():
        made = render(tokenizer, messages, tools, probes.variables, probes.day)
        if made and (not tools or made != render(tokenizer, messages, None, probes.variables, probes.day)):
            found.append(
                Probe(
                    messages=messages, tools=tools, text=made[0], prompt=made[1],
                    answer=[0], ended=False, logprobs=[0.0], top=[[]],
                )
            )  # fmt: skip
    return found
