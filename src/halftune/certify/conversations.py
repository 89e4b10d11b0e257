"""The conversations that a chat template is tried on. Every text has a mark, which occurs once."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

MARK = re.compile(r"[AUST]q\d+z")
BESIDE, THOUGHT = "a tool call with text beside it", "<think> in the last of two answers"
REASONED = "Aq88z"  # in the field for reasoning, which templates may leave out
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name} of a {key}.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": f"Name of the {key}."}},
                "required": [key],
            },
        },
    }
    for name, key in (("weather", "town"), ("clock", "zone"))
]
# The texts around a mark that occurs once in a conversation.
_TEXTS = (
    'Say {} & "so" <b>.',
    "First line\n\n    {}\n- last line",
    "你好 {} 🎉",
    "  {} with spaces around  ",
    "{0} or not {0}",
)
COUNT = 8 * len(_TEXTS)
_FILLING = " ".join(str(n) for n in range(400))


def conversations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``COUNT`` conversations, and what each is an example of: eight kinds, five ways to write texts."""
    for text in _TEXTS:
        numbers = itertools.count()

        def write(letter: str, text: str = text, numbers: Iterator[int] = numbers) -> str:
            return text.format(f"{letter}q{next(numbers)}z")

        def say(role: str, write: Any = write, *, long: bool = False, **more: Any) -> dict[str, Any]:
            letter = "A" if role == "assistant" else role[0].upper()
            content = f"{write(letter)} {_FILLING} {write(letter)}" if long else write(letter)
            return {"role": role, "content": content, **more}

        def turn(say: Any = say, **more: Any) -> list[dict[str, Any]]:
            return [say("user"), say("assistant", **more)]

        long = [say(role, long=True) for role in ("system", "user", "assistant")]
        thought = say("assistant")
        thought["content"] = f"<think>\nI think Aq66z.\n</think>\n\n{thought['content']}"
        town, zone = _call("weather", town="Aq77z"), _call("clock", zone="Aq78z")
        both = {"role": "assistant", "content": "", "tool_calls": [town, zone]}
        yield "one turn", {"messages": turn()}
        yield "six turns", {"messages": [one for _ in range(6) for one in turn()]}
        yield "long texts with a system message", {"messages": long}
        yield "tools with a system message", {"messages": [say("system"), *turn()], "tools": TOOLS}
        beside = say("assistant", tool_calls=[town])
        called = [say("system"), say("user"), beside, say("tool"), say("assistant")]
        yield BESIDE, {"messages": called, "tools": TOOLS}
        called = [say("user"), both, say("tool"), say("tool"), say("assistant")]
        yield "two tool calls", {"messages": called, "tools": TOOLS}
        yield THOUGHT, {"messages": [*turn(), say("user"), thought]}
        yield (
            "reasoning in the last of two turns",
            {"messages": [*turn(), *turn(reasoning_content=f"I think {REASONED}.")]},
        )


def _call(name: str, **arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
