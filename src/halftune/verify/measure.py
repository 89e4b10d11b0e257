"""Greedy answers, and log-probabilities of answers, by a model in memory.

Shapes: T tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from peft import PeftModel

from halftune.core.processes import heartbeat
from halftune.data.batch import collate
from halftune.data.store import Example, Segment
from halftune.model.generate import ending_ids, evaluating, generate_answers
from halftune.model.policy.policy import PolicyModel
from halftune.verify.draw import Question
from halftune.verify.probes import TOP, Probe
from halftune_kernels.ops.linear_cross_entropy import rows_at_a_time

LONGEST_ANSWER = 32  # tokens
_TOKENS = 4096  # of prompts at a time, with padding

T = TypeVar("T")
Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Scores:
    """What a model says of one answer.

    Attributes:
        logprobs: ``[T]`` of its tokens, in nats.
        top: ``[T]`` of (id, log-probability) of the ``TOP`` likeliest tokens, likeliest first.
        asked: ``[T]`` of the log-probabilities of the tokens that were asked for; empty without.
    """

    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    asked: list[list[float]]


def measure(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    forward: Around = nullcontext,
    generating: Around = nullcontext,
    sharded: torch.device | None = None,
) -> list[Probe]:
    """Answer prompts greedily, and score the answers by the model and, behind an adapter, by its base.

    The model is in evaluation mode meanwhile; compiled layers run uncompiled.

    Args:
        model: a peft or transformers model on its device.
        tokenizer: its tokenizer.
        questions: prompts.
        forward: a context of each forward pass (autocast).
        generating: a context of generation.
        sharded: compute device of sharded weights; all processes call this with the same arguments.
    """
    causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    device, pad = sharded or causal.device, tokenizer.pad_token_id or 0
    ends = ending_ids(tokenizer, causal.generation_config)
    limit = getattr(causal.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    fitting = (one for one in questions if len(one.ids) + LONGEST_ANSWER <= limit)
    questions = sorted(fitting, key=lambda one: len(one.ids))  # little padding
    with torch.no_grad(), evaluating(model), torch.compiler.set_stance("force_eager"):
        answers: list[list[int]] = []
        for part in _parts(questions, lambda one: len(one.ids)):
            with generating(), forward():
                prompts = [np.array(one.ids, np.int32) for one in part]
                made = generate_answers(
                    causal, prompts, ends=ends, most=LONGEST_ANSWER, pad=pad, device=device, synced=sharded is not None
                )
            answers += [one.tolist() for one in made]
            heartbeat.beat()
        pairs = [(one.ids, answer) for one, answer in zip(questions, answers, strict=True)]
        trained, base = score(model, pairs, pad, device, forward), None
        if isinstance(model, PeftModel):
            with PolicyModel(model).without_adapter():
                base = score(model, pairs, pad, device, forward)
    return [
        Probe(
            messages=question.messages,
            tools=question.tools,
            text=question.text,
            prompt=question.ids,
            answer=answers[at],
            ended=answers[at][-1] in ends,
            logprobs=trained[at].logprobs,
            top=trained[at].top,
            base=None if base is None else base[at].logprobs,
        )
        for at, question in enumerate(questions)
    ]


def score(
    model: Any,
    pairs: Sequence[tuple[list[int], list[int]]],
    pad: int,
    device: torch.device,
    forward: Around = nullcontext,
    asked: Sequence[list[list[int]]] = (),
) -> list[Scores]:
    """Score answers.

    Args:
        model: a peft or transformers model on its device, in evaluation mode.
        pairs: (prompt, answer) token ids.
        pad: id of padding.
        device: that the model computes on.
        forward: a context of each forward pass.
        asked: for each answer ``[T, K]`` tokens whose log-probabilities are wanted too.
    """
    found: list[Scores] = []
    for part in _parts(pairs, lambda pair: len(pair[0]) + len(pair[1])):
        examples = [Example((_segment(prompt, answer),)) for prompt, answer in part]
        wanted = [ids for answer in asked[len(found) : len(found) + len(part)] for ids in answer]
        rows: list[tuple[float, list[tuple[int, float]], list[float]]] = []
        with torch.no_grad(), forward():
            own = PolicyModel(model).head_rows(collate(examples, pad, packed=False).to(device))
            chunk = rows_at_a_time(own.vocabulary, own.rows.device)
            for hidden, targets in zip(own.rows.split(chunk), own.targets.split(chunk), strict=True):
                logprobs = own.head(hidden).float().log_softmax(-1)
                values, (best, ids) = logprobs.gather(1, targets[:, None])[:, 0], logprobs.topk(TOP)
                for row, one in enumerate(zip(values.tolist(), ids.tolist(), best.tolist(), strict=True)):
                    own_wanted = wanted[len(rows)] if wanted else []
                    rows.append((one[0], list(zip(one[1], one[2], strict=True)), logprobs[row, own_wanted].tolist()))
        heartbeat.beat()
        every = iter(rows)
        for _, answer in part:
            values, tops, more = zip(*(next(every) for _ in answer), strict=True)
            found.append(Scores(list(values), list(tops), list(more)))
    return found


def _segment(prompt: list[int], answer: list[int]) -> Segment:
    ids = np.array([*prompt, *answer], np.int32)
    return Segment(ids, np.arange(len(ids)) >= len(prompt))


def _parts(items: Sequence[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Successive items that fit ``_TOKENS`` when padded; at least one."""
    part: list[T] = []
    for one in items:
        if part and (len(part) + 1) * max(map(length, [*part, one])) > _TOKENS:
            yield part
            part = []
        part.append(one)
    if part:
        yield part
