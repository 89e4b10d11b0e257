"""Greedy answers to many prompts: batches of like length, padded on the left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase

from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.evaluate.rows import Question
from halftune.model.generate import ending_ids, generate_answers
from halftune.model.tokenizer.added_tokens import visible_text
from halftune.model.tokenizer.vocabulary import padding_id
from halftune.plan import Plan
from halftune.precision.dtypes import autocast
from halftune.train.loop.out_of_memory import out_of_memory

log = get_logger(__name__)

BATCH_TOKENS = 1 << 14  # of a batch, padding and answers included


def answer(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Question],
    plan: Plan,
    *,
    max_new_tokens: int,
    added: Sequence[str] = (),
) -> list[str]:
    """The model's likeliest token after token, until an end of turn; without special tokens and outer white space.

    Args:
        model: on its device, a peft model or a transformers one.
        tokenizer: its tokenizer.
        asked: N prompts.
        plan: gives autocast.
        max_new_tokens: longest answer.
        added: tokens of the recipe that answers show, special or not.

    Raises:
        ModelError: the model cannot generate, a prompt leaves no room for an answer, or logits are not finite.
    """
    causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if not causal.can_generate():
        what, remedy = f"{type(causal).__name__} generates no text", "leave out --metrics: the loss is measured"
        raise ModelError(what, where="--metrics", remedy=remedy, code="evaluate.no_generation")
    room = getattr(causal.config.get_text_config(), "max_position_embeddings", None)
    longest = max(len(one.ids) for one in asked)
    if room is not None and longest >= room:
        what, remedy = (
            f"a prompt has {longest:,} tokens; the model's limit is {room:,}",
            "set a smaller data.max_length",
        )
        raise ModelError(what, remedy=remedy, code="infer.conversation_too_long")
    ends, padding = ending_ids(tokenizer, causal.generation_config), padding_id(causal, tokenizer)
    found = [""] * len(asked)
    with autocast(plan.precision, causal.device):
        for places in batches([len(one.ids) for one in asked], max_new_tokens, room=room):
            prompts = [asked[place].ids for place in places]
            # the longest prompt comes first
            most = max_new_tokens if room is None else min(max_new_tokens, room - len(prompts[0]))
            made = _generate(partial(generate_answers, causal, ends=ends, most=most, pad=padding), prompts)
            for place, ids in zip(places, made, strict=True):
                shown = [one for one in ids.tolist() if one not in ends]
                found[place] = visible_text(tokenizer, shown, added).strip()
    return found


def batches(lengths: Sequence[int], new: int, tokens: int = BATCH_TOKENS, room: int | None = None) -> list[list[int]]:
    """Places of prompts in batches, longest first, so that a batch that does not fit is found early.

    Args:
        lengths: of the prompts, in tokens.
        new: tokens of an answer.
        tokens: of a batch, padding included; a single prompt may have more.
        room: the model's limit for prompt and answer; None: there is none.
    """
    order, found = sorted(range(len(lengths)), key=lambda place: -lengths[place]), list[list[int]]()
    while order:
        longest = lengths[order[0]] + new
        # a prompt that leaves no room for a whole answer would cut the answers of its batch
        rows = 1 if room is not None and longest > room else max(1, tokens // longest)
        found.append(order[:rows])
        order = order[rows:]
    return found


def _generate(answers: Callable[..., list[np.ndarray]], prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """An answer to each prompt; a batch that does not fit into memory is halved."""
    try:
        return answers(prompts=prompts)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error) or len(prompts) == 1:
            raise
    half = len(prompts) // 2
    log.warning("out of memory: %d prompts at a time", half)
    return [*_generate(answers, prompts[:half]), *_generate(answers, prompts[half:])]
