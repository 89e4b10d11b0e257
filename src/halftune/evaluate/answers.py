"""Greedy answers to many prompts: batches of like length, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.evaluate.rows import Question
from halftune.model.generate import Finite, decoding, ending_ids
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
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=ends or None, pad_token_id=padding, use_cache=True
    )
    found = [""] * len(asked)
    with decoding(causal, settings), torch.inference_mode(), autocast(plan.precision, causal.device):
        for places in batches([len(one.ids) for one in asked], max_new_tokens):
            prompts = [asked[place].ids for place in places]
            if room is not None:
                settings.max_new_tokens = min(max_new_tokens, room - len(prompts[0]))  # the longest comes first
            made = _generate(causal, prompts, settings)
            for place, ids in zip(places, made, strict=True):
                found[place] = visible_text(tokenizer, cut(ids, ends), added).strip()
    return found


def batches(lengths: Sequence[int], new: int, tokens: int = BATCH_TOKENS) -> list[list[int]]:
    """Places of prompts in batches, longest first, so that a batch that does not fit is found early.

    Args:
        lengths: of the prompts, in tokens.
        new: tokens of an answer.
        tokens: of a batch, padding included; a single prompt may have more.
    """
    order, found = sorted(range(len(lengths)), key=lambda place: -lengths[place]), list[list[int]]()
    while order:
        rows = max(1, tokens // (lengths[order[0]] + new))
        found.append(order[:rows])
        order = order[rows:]
    return found


def cut(ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens of an answer before the first one that ends it."""
    stop = next((place for place, one in enumerate(ids) if one in ends), len(ids))
    return list(ids[:stop])


def _generate(causal: Any, prompts: Sequence[np.ndarray], settings: GenerationConfig) -> list[list[int]]:
    """New token ids of each prompt; a batch that does not fit into memory is halved."""
    try:
        return _one_batch(causal, prompts, settings)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error) or len(prompts) == 1:
            raise
    half = len(prompts) // 2
    log.warning("out of memory: %d prompts at a time", half)
    return [*_generate(causal, prompts[:half], settings), *_generate(causal, prompts[half:], settings)]


def _one_batch(causal: Any, prompts: Sequence[np.ndarray], settings: GenerationConfig) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), int(settings.pad_token_id or 0))
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    made = causal.generate(
        ids.to(causal.device),
        attention_mask=mask.to(causal.device),
        generation_config=settings,
        logits_processor=LogitsProcessorList([Finite()]),
    )
    return made[:, longest:].tolist()
