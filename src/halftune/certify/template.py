"""Whether a tokenizer's chat template trains the answers of conversations of every kind, and nothing else."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from halftune.certify.certificate import Line, Verdict, listed
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
_TEXTS = (
    'Say {} & "so" <b>.',
    "First line\n\n    {}\n- last line",
    "你好 {} 🎉",
    "  {} with spaces around  ",
    "{0} or not {0}",
)
_LOST = {mask.LOST_TEXT: "a message's text", mask.LEFT_OUT: "an answer's text"}
_UNSUPPORTED = {
    mask.NO_TOOLS: "tools",
    mask.NO_REASONING: "reasoning",
    mask.NO_SYSTEM_SHOWN: "system messages",
    mask.VAGUE: "answers whose begin it does not show",
}
_MARK = re.compile(r"[AUST]q\d+z")
_REASONED = {"Aq88z", "Aq99z"}  # templates may leave reasoning out
_ROLE = re.compile(r"\b(assistant|user|human|model|system)\b", re.IGNORECASE)


def check_template(bench: Workbench) -> Iterator[Line]:
    """Tokenise 40 conversations and look at the tokens with a label."""
    try:
        tokenizer = load_tokenizer(bench.whole)
    except HalftuneError as error:
        named = bench.whole.tokenizer is not None or bench.whole.chat_template is not None
        absent = error.code == "model.tokenizer_missing" and not named
        what = f"no template was checked: {error.what}"
        yield Line("template", "note" if absent else "no", what, error.remedy or "")
        return
    if not tokenizer.chat_template:
        verdict: Verdict = "note" if bench.whole.chat_template is None else "no"
        yield Line("template", verdict, "the tokenizer has no chat template", "set model.chat_template")
        return
    yield from _look(bench, tokenizer)


def _look(bench: Workbench, tokenizer: PreTrainedTokenizerBase) -> Iterator[Line]:
    rows = list(conversations())
    found: dict[str, list[str]] = {}
    exact = 0
    lost: dict[str, int] = {}
    left_out: set[str] = set()
    refused: dict[str, str] = {}
    for kind, row in rows:
        path = bench.folder / "conversation-of-template.jsonl"
        path.write_text(json.dumps(row, ensure_ascii=False) + "\n")
        config = bench.asked("template", data={"train": str(path), "max_length": 4096, "cache": False}).run
        try:
            data = prepare(config, tokenizer)
        except HalftuneError as error:
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
        faults = _faults(data.train, tokenizer, row)
        exact += not faults
        for fault in faults:
            found.setdefault(fault, []).append(kind)
    what = f"the labels of {exact} of {len(rows)} conversations are the answers and nothing else"
    wrong = [f"{fault} in {listed(dict.fromkeys(of))}" for fault, of in found.items()]
    yield Line("template", "no" if wrong or lost or not exact else "yes", "; ".join([what, *wrong, *_losses(lost)]))
    for kind, why in refused.items():
        yield Line("template", "note", f"refused in {kind}: {why}")
    if left_out:
        yield Line("template", "note", f"it leaves out {listed(sorted(left_out), 9)}; each run's data report says so")


def _losses(lost: dict[str, int]) -> Iterator[str]:
    for place, count in lost.items():
        yield f"it loses {place} ({count} conversations)"


def _faults(samples: TokenizedSplit, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> list[str]:
    """What is wrong with the labels or the texts of a conversation."""
    (segment,) = samples.example(0).segments
    edges = np.flatnonzero(np.diff(segment.loss_mask.astype(np.int8))) + 1
    runs = [str(tokenizer.decode(ids.tolist())) for ids in np.split(segment.input_ids, edges)]
    labelled = [bool(mask[0]) for mask in np.split(segment.loss_mask, edges)]
    trained = [run for run, label in zip(runs, labelled, strict=True) if label]
    inside, outside = (
        set(_MARK.findall("".join(run for run, label in zip(runs, labelled, strict=True) if label is wanted)))
        for wanted in (True, False)
    )
    said = [one for one in row["messages"] if one["role"] == "assistant"]
    marks = set(_MARK.findall(json.dumps(said)))
    faults = []
    if inside - marks:
        faults.append("another text has labels")
    if marks & outside or marks - inside - _REASONED:
        faults.append("a part of an answer has none")
    if any(one["content"].strip() not in "".join(trained) for one in said):
        faults.append("an answer is changed")
    if any(_begins_early(run, said) for run in trained):
        faults.append("labels begin before the answer")
    return faults + _changed(str(tokenizer.decode(segment.input_ids.tolist())), row["messages"])


def _begins_early(run: str, said: list[dict[str, Any]]) -> bool:
    """Whether a run of labels has the name of a role before its answer."""
    starts = [place for one in said if one["content"] and (place := run.find(one["content"].strip())) >= 0]
    return bool(starts) and _ROLE.search(run[: min(starts)]) is not None


def _changed(text: str, messages: list[dict[str, Any]]) -> list[str]:
    """Whether the users' texts stand in a rendering as they are, in their order, and each text once."""
    at = 0
    for one in messages:
        if one["role"] != "user":
            continue
        if (found := text.find(one["content"].strip(), at)) < 0:
            return ["a user's text is changed, lost or out of order"]
        at = found + 1
    contents = "".join(one["content"] for one in messages)
    twice = any(text.count(one) > contents.count(one) for one in _MARK.findall(contents))
    return ["a text is repeated"] if twice else []


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
