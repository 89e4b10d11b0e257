"""Tries continuous batching on the loaded model: some models' code leaves the cache out, or mixes requests."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from contextlib import contextmanager

from halftune.config.sections.training import GenerationSection
from halftune.serve.batching import BatchedLane
from halftune.serve.sampling import End, Job, Token
from halftune.serve.shared_model import SharedModel

_LOGGER = "ContinuousBatchingLogger"  # writes the traceback of a failed pass
_TOKENS = 4  # of each answer
_SECONDS = 600  # for one token
_ROUNDING = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}  # of a log-probability, by compute dtype


def batching_holds(shared: SharedModel, lane: BatchedLane, adapter: str | None) -> bool:
    """Whether two requests at once get the log-probabilities of a plain forward pass of each.

    Args:
        shared: the model.
        lane: answers as ``adapter``.
        adapter: name in the peft model; None: the base.
    """
    vocabulary = shared.causal.config.get_text_config().vocab_size
    prompts = [[number * step % vocabulary for number in range(3, 20 + step)] for step in (1, 7)]
    told: list[queue.SimpleQueue[Token | End]] = [queue.SimpleQueue() for _ in prompts]
    settings = GenerationSection()
    jobs = [Job(prompt, _TOKENS, frozenset(), settings, one.put, 0) for prompt, one in zip(prompts, told, strict=True)]
    with _without_tracebacks():
        for job in jobs:
            lane.submit(job)
        answers = [_tokens(one) for one in told]
        for job in jobs:
            lane.release(job)
    return all(_is_same(shared, adapter, *pair) for pair in zip(prompts, answers, strict=True))


def _tokens(told: queue.SimpleQueue[Token | End]) -> list[Token]:
    """An answer's tokens: fewer than asked for if the forward pass failed."""
    tokens: list[Token] = []
    while not isinstance(item := told.get(timeout=_SECONDS), End):
        tokens.append(item)
    return tokens


def _is_same(shared: SharedModel, adapter: str | None, prompt: list[int], answer: list[Token]) -> bool:
    if len(answer) < _TOKENS:
        return False
    alone = shared.read(prompt + [token.id for token in answer], adapter, 0)[len(prompt) :]
    gaps = [abs((one.logprob or 0) - (other.logprob or 0)) for one, other in zip(answer, alone, strict=True)]
    return max(gaps) <= _ROUNDING[shared.plan.precision.compute.value]


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    logger = logging.getLogger(_LOGGER)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
