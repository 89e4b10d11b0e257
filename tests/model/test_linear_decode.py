"""Hybrid models one token after the other: prompts padded on the left side by side give what each gives alone."""

from __future__ import annotations

import pytest
import torch
from test_linear_packing import model_of, relative, routed

BOUND = 1e-5


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "zamba2", "nemotron_h", "rwkv7"])
def test_padded_on_the_left_is_alone(family: str) -> None:
    """Logits of the prompts' last token, then of tokens from the cache, against one pass over each whole text."""
    model, later, padding = model_of(family).eval(), 3, 5
    texts = torch.randint(3, 96, (2, 9 + later))
    mask = torch.ones_like(texts)
    mask[1, :padding] = 0
    texts[1, :padding] = 0
    with torch.no_grad(), routed(model):
        alone = [model(input_ids=texts[n : n + 1, start:]).logits[0] for n, start in enumerate((0, padding))]
        cut, found = texts.shape[1] - later, []
        out = model(input_ids=texts[:, :cut], attention_mask=mask[:, :cut], use_cache=True)
        for place in range(cut, texts.shape[1] + 1):
            found.append(out.logits[:, -1])
            if place < texts.shape[1]:
                cache = {"past_key_values": out.past_key_values, "attention_mask": mask[:, : place + 1]}
                out = model(input_ids=texts[:, place : place + 1], use_cache=True, **cache)
    for n, whole in enumerate(alone):
        assert relative(torch.stack(found, 1)[n], whole[-later - 1 :]) < BOUND
