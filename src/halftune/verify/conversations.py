"""Conversations that clients send and probes may not hold: several turns, a system text, tools, odd characters."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from halftune.verify.draw import render
from halftune.verify.probes import Probe, Probes


@cache
def _all() -> list[dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "conversations.yaml").read_text(encoding="utf-8"))


def conversations(probes: Probes, tokenizer: Any) -> list[Probe]:
    """Further prompts, without answers; those that the result's own template refuses, or whose tools it drops, are not
    among them.

    Args:
        probes: of the result.
        tokenizer: of the result.
    """
    found = []
    for messages, tools in ((one["messages"], one.get("tools")) for one in _all() if tokenizer.chat_template):
        made = render(tokenizer, messages, tools, probes.variables, probes.day)
        if made and (not tools or made != render(tokenizer, messages, None, probes.variables, probes.day)):
            found.append(
                Probe(
                    messages=messages, tools=tools, text=made[0], prompt=made[1],
                    answer=[0], ended=False, logprobs=[0.0], top=[[]],
                )
            )  # fmt: skip
    return found
