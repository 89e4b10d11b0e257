"""Whether a tokenizer's chat template trains the answers of conversations of every kind, and nothing else."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from halftune.certify.certificate import Line, listed
from halftune.certify.workbench import Workbench
from halftune.core.errors import HalftuneError
from halftune.data import mask
from halftune.data.pipeline import prepare
from halftune.data.split import TokenizedSplit
from halftune.model.tokenizer import load_tokenizer

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
# The texts around a mark that occurs once in a conversation.
_TEXTS = ("Say {}.", "First line\n\n    {}\n- last line", "你好 {} 🎉", "  {} with spaces around  ", "{0} or not {0}")
_LOST = {mask.LOST_TEXT: "a message's text", mask.LEFT_OUT: "an answer's text"}
_UNSUPPORTED = {
    mask.NO_TOOLS: "tools",
    mask.NO_REASONING: "reasoning",
    mask.NO_SYSTEM_SHOWN: "system messages",
    mask.VAGUE: "answers whose begin it does not show",
}
_MARK = re.compile(r"[AUST]q\d+z")


def check_template(bench: Workbench) -> Iterator[Line]:
    """Tokenise 40 conversations and look at the tokens with a label."""
    try:
        tokenizer = load_tokenizer(bench.whole)
    except HalftuneError as error:
        yield Line("template", "note", f"no tokenizer, so no template was checked: {error.what}", error.remedy or "")
        return
    if not tokenizer.chat_template:
        yield Line("template", "note", "the tokenizer has no chat template", "set model.chat_template")
        return
    yield from _look(bench, tokenizer)


def _look(bench: Workbench, tokenizer: PreTrainedTokenizerBase) -> Iterator[Line]:
    rows = list(conversations())
    kinds: dict[str, list[bool | None]] = {}
    lost: dict[str, int] = {}
    left_out: set[str] = set()
    refused: dict[str, str] = {}
    for kind, row in rows:
        path = bench.folder / "conversation-of-template.jsonl"
        path.write_text(json.dumps(row, ensure_ascii=False) + "\n")
        config = bench.asked("template", data={"train": str(path), "max_length": 4096}).run
        try:
            data = prepare(config, tokenizer)
        except HalftuneError as error:
            kinds.setdefault(kind, []).append(None)
            refused.setdefault(kind, error.what)
            continue
        report = data.report.train[0]
        for note in report.notes:
            if note in _LOST:
                lost[f"{_LOST[note]} in {kind}"] = lost.get(f"{_LOST[note]} in {kind}", 0) + 1
            elif note in _UNSUPPORTED:
                left_out.add(_UNSUPPORTED[note])
        if mask.NO_END in report.notes:
            left_out.add("a token that ends an answer")
        kinds.setdefault(kind, []).append(_exact(data.train, tokenizer, row))
    looked = list(itertools.chain.from_iterable(kinds.values()))
    exact, wrong = sum(one is True for one in looked), [kind for kind, ones in kinds.items() if False in ones]
    what = f"the labels of {exact} of {len(rows)} conversations are the answers and nothing else"
    if wrong:
        what += f"; wrong in {listed(wrong)}"
    yield Line("template", "no" if wrong or lost or not exact else "yes", "; ".join([what, *_losses(lost)]))
    for kind, why in refused.items():
        yield Line("template", "note", f"refused in {kind}: {why}")
    if left_out:
        yield Line("template", "note", f"it leaves out {listed(sorted(left_out), 9)}; each run's data report says so")


def _losses(lost: dict[str, int]) -> Iterator[str]:
    for place, count in lost.items():
        yield f"it loses {place} ({count} conversations)"


def _exact(samples: TokenizedSplit, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> bool:
    """Whether all answers have labels, whole, and no other text has."""
    (segment,) = samples.example(0).segments
    trained, rest = [], []
    edges = np.flatnonzero(np.diff(segment.loss_mask.astype(np.int8))) + 1
    for ids, labelled in zip(np.split(segment.input_ids, edges), np.split(segment.loss_mask, edges), strict=True):
        (trained if labelled[0] else rest).append(tokenizer.decode(ids.tolist()))
    answers = [one["content"].strip() for one in row["messages"] if one["role"] == "assistant"]
    marks = {mark for one in row["messages"] if one["role"] == "assistant" for mark in _MARK.findall(json.dumps(one))}
    inside, outside = set(_MARK.findall("".join(trained))), set(_MARK.findall("".join(rest)))
    text = "".join(trained)
    shown = marks & (inside | outside)  # reasoning of earlier turns may be left out
    return inside == shown and not outside & marks and all(one in text for one in answers)


def conversations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield 40 conversations, and what each is an example of: eight kinds, each with five ways to write texts."""
    for text in _TEXTS:
        numbers = itertools.count()

        def say(role: str, letter: str, text: str = text, numbers: Iterator[int] = numbers, **more: Any) -> dict:
            return {"role": role, "content": text.format(f"{letter}q{next(numbers)}z"), **more}

        def turn(say: Any = say, **more: Any) -> list[dict[str, Any]]:
            return [say("user", "U"), say("assistant", "A", **more)]

        call = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Aq77z"}}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        yield "one turn", {"messages": turn()}
        yield "a system message", {"messages": [say("system", "S"), *turn()]}
        yield "three turns", {"messages": [*turn(), *turn(), *turn()]}
        yield "a system message and two turns", {"messages": [say("system", "S"), *turn(), *turn()]}
        yield "tools that are not called", {"messages": turn(), "tools": [_TOOL]}
        yield (
            "a tool call",
            {"messages": [say("user", "U"), called, say("tool", "T"), say("assistant", "A")], "tools": [_TOOL]},
        )
        yield "reasoning", {"messages": turn(reasoning_content="I think Aq88z.")}
        yield "reasoning in the last of two turns", {"messages": [*turn(), *turn(reasoning_content="I think Aq99z.")]}
