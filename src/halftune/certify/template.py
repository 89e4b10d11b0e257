"""Whether a tokenizer's chat template trains the answers of conversations of every kind, and nothing else."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from halftune.certify.certificate import Line, Verdict, listed
from halftune.certify.conversations import BESIDE, COUNT, MARK, REASONED, THOUGHT, conversations
from halftune.certify.headers import OPENS_THOUGHT, header_faults, parts_of
from halftune.certify.workbench import Workbench
from halftune.core.errors import HalftuneError
from halftune.data.pipeline import prepare
from halftune.data.store import Segment
from halftune.data.templates import loss_mask, omitted_text
from halftune.data.templates.features import NO_PARALLEL, SPLIT
from halftune.data.templates.render import ChatTemplate

_LOST = {
    **{note: f"a {role} message's text" for role, note in omitted_text.LOST_TEXT.items()},
    omitted_text.MOVED: "the order of messages",
    omitted_text.LEFT_OUT: "an answer's text",
    omitted_text.LOST_REASONING: "the reasoning in an answer's text",
    omitted_text.LOST_TOOLS: "a tool, its description or a parameter",
}
_UNSUPPORTED = {
    omitted_text.NO_TOOLS: "tools",
    omitted_text.NO_REASONING: "reasoning",
    omitted_text.NO_SYSTEM_SHOWN: "system messages",
    loss_mask.VAGUE: "answers whose begin it does not show",
    loss_mask.NO_END: "a token that ends an answer",
    SPLIT: "parallel tool calls, which become a turn each",
    NO_PARALLEL: "parallel tool calls",
}
# kind of conversation → what templates of published models leave out on purpose; the data report of a run counts it
_OFTEN = {BESIDE: "text beside a tool call", THOUGHT: "reasoning in an answer's text (<think>)"}
_ON_PURPOSE = {omitted_text.LEFT_OUT, omitted_text.LOST_REASONING}  # the notes about it
_NO_LABEL, _CHANGED = "a part of an answer has none", "an answer is changed"
_ROLE = re.compile(r"\b(assistant|user|human|model|system)\b", re.IGNORECASE)


@dataclass
class Tokenised:
    """What the conversations became.

    Attributes:
        lengths: tokens of each.
        largest: the largest id.
        ends: the special tokens that end answers.
    """

    lengths: list[int] = field(default_factory=list)
    largest: int = 0
    ends: set[int] = field(default_factory=set)


def check_template(bench: Workbench, tokenizer: PreTrainedTokenizerBase, seen: Tokenised) -> Iterator[Line]:
    """Tokenise 40 conversations and look at the tokens with a label.

    Args:
        bench: of the model itself.
        tokenizer: its tokenizer.
        seen: is filled in.
    """
    if not tokenizer.chat_template:
        verdict: Verdict = "note" if bench.whole.chat_template is None else "no"
        yield Line("template", verdict, "the tokenizer has no chat template", "set model.chat_template")
        return
    found = _Found()
    template = None
    for kind, row in conversations():
        path = bench.folder / "conversation-of-template.jsonl"
        path.write_text(json.dumps(row, ensure_ascii=False) + "\n")
        config = bench.asked("template", data={"train": str(path), "max_length": 16384, "cache": False}).run
        try:
            data = prepare(config, tokenizer)
            template = template or ChatTemplate(tokenizer)
        except HalftuneError as error:
            found.refused.setdefault(kind, error.what)
            continue
        (segment,) = data.train.example(0).segments
        _take(segment, tokenizer, seen)
        found.add(kind, data.report.train[0].notes, [*_faults(segment, tokenizer, row), *header_faults(template, row)])
    yield from found.lines()


@dataclass
class _Found:
    """What is wrong with the conversations: fault → their kinds; and how many have no fault."""

    exact: int = 0
    faults: dict[str, list[str]] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    left_out: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, notes: Collection[str], faults: list[str]) -> None:
        if kind in _OFTEN and not _ON_PURPOSE.isdisjoint(notes):
            self.left_out.add(_OFTEN[kind])
            notes = [note for note in notes if note not in _ON_PURPOSE]
            faults = [fault for fault in faults if fault not in (_NO_LABEL, _CHANGED)]
        self.lost.update(f"{_LOST[note]} in {kind}" for note in notes if note in _LOST)
        self.left_out.update(_UNSUPPORTED[note] for note in notes if note in _UNSUPPORTED)
        self.exact += not set(faults) - {OPENS_THOUGHT}
        for fault in faults:
            self.faults.setdefault(fault, []).append(kind)

    def lines(self) -> Iterator[Line]:
        what = f"the labels of {self.exact} of {COUNT} conversations are the answers and nothing else"
        opens_thought = self.faults.pop(OPENS_THOUGHT, [])
        wrong = [f"{fault} in {listed(dict.fromkeys(of))}" for fault, of in self.faults.items()]
        wrong += [f"it loses {place} ({count} conversations)" for place, count in self.lost.items()]
        yield Line("template", "no" if wrong or not self.exact else "yes", "; ".join([what, *wrong]))
        for kind, why in self.refused.items():
            yield Line("template", "note", f"refused in {kind}: {why}")
        if self.left_out:
            what = f"it leaves out {listed(sorted(self.left_out), 9)}; each run's data report says so"
            yield Line("template", "note", what)
        if opens_thought:
            yield Line("template", "note", OPENS_THOUGHT, "write answers with reasoning")


def _take(segment: Segment, tokenizer: PreTrainedTokenizerBase, seen: Tokenised) -> None:
    seen.lengths.append(len(segment.input_ids))
    seen.largest = max(seen.largest, int(segment.input_ids.max()))
    labelled = np.flatnonzero(segment.loss_mask)
    last = int(segment.input_ids[labelled[-1]]) if len(labelled) else -1
    if last in tokenizer.added_tokens_decoder:
        seen.ends.add(last)


def _faults(segment: Segment, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> list[str]:
    """What is wrong with the labels or the texts of a conversation."""
    trained, untrained = _runs(segment, tokenizer)
    whole = "".join(trained)
    inside, outside = set(MARK.findall(whole)), set(MARK.findall("".join(untrained)))
    answers = [message for message in row["messages"] if message["role"] == "assistant"]
    parts = list(map(parts_of, answers))
    marks = set(MARK.findall(json.dumps(answers)))
    faults = {
        "another text has labels": inside - marks,
        _NO_LABEL: marks & outside or marks - inside - {REASONED},
        _CHANGED: any(part not in whole for part in chain.from_iterable(parts)),
        "labels begin before the answer": any(_begins_early(run, parts) for run in trained),
        "reasoning stands after its answer": (
            "reasoning_content" in answers[-1] and REASONED in whole.rpartition(parts[-1][-1])[2]
        ),
        "the BOS token is there twice": segment.input_ids[:2].tolist() == [tokenizer.bos_token_id] * 2,
    }
    text = str(tokenizer.decode(segment.input_ids.tolist()))
    return [*filter(faults.get, faults), *_changed(text, row["messages"])]


def _runs(segment: Segment, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
    """The texts of consecutive tokens with a label, and those of tokens without."""
    edges = np.flatnonzero(np.diff(segment.loss_mask.astype(np.int8))) + 1
    trained, untrained = list[str](), list[str]()
    for ids, labelled in zip(np.split(segment.input_ids, edges), np.split(segment.loss_mask, edges), strict=True):
        (trained if labelled[0] else untrained).append(str(tokenizer.decode(ids.tolist())))
    return trained, untrained


def _begins_early(run: str, said: list[list[str]]) -> bool:
    """Whether a run of labels has the name of a role before its answer."""
    starts = [place for parts in said if parts and (place := run.find(parts[0])) >= 0]
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
    twice = any(text.count(one) > contents.count(one) for one in MARK.findall(contents))
    return ["a text is repeated"] if twice else []
