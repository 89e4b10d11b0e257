"""Whether FlashAttention computes what a class's own eager attention does; a kernel in torch stands in for the GPU's.

Its calls take a window from their arguments. A window or chunk that a class has only in its masks would be lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import flash_attention_mask

from halftune.attention.contract import AttentionPlan
from halftune.attention.flash import FlashAttention, flash_attn_varlen
from halftune.attention.flash_in_torch import flash_attn_varlen_func
from halftune.attention.varlen import attention_callable
from halftune.core.choice import Choice
from halftune.core.errors import HalftuneError
from halftune.model.attention.packed_rows import PackedRowMasks
from halftune.model.attention.packing_check import LENGTHS, REFUSALS, VOCABULARY, silent, small_copy

LOST = 1e-3  # relative error of logits in fp32; a lost window measures 0.1 and more
_NAME = "halftune_kernel_in_torch"
_WINDOW = re.compile(r"^(attention_chunk_size|\w*sliding_window(_size)?|\w*window_size)$")


@contextmanager
def flash_in_torch() -> Iterator[str]:
    """Inside, transformers knows an attention by this name: FlashAttention for padded and packed rows, in torch."""
    softmax, provider, varlen, linear = (
        Choice(name, "") for name in ("fa2", "flash_attn", "flash_attn_varlen", "none")
    )
    plan = AttentionPlan(softmax, provider, varlen, linear, rejected=(), guard="off")
    attend = attention_callable(plan, FlashAttention(flash_attn_varlen(flash_attn_varlen_func)))
    rows = PackedRowMasks()
    AttentionInterface.register(_NAME, rows.attention(attend))
    AttentionMaskInterface.register(_NAME, rows.mask(flash_attention_mask))
    try:
        yield _NAME
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_NAME)


def padded_error(model: Any, attention: str) -> float:
    """Largest relative difference of a sample's logits in a padded batch and alone in eager attention.

    Args:
        model: in eval mode, on the CPU.
        attention: attention implementation of the padded batch.
    """
    samples = torch.randint(3, VOCABULARY, (1, sum(LENGTHS))).split(LENGTHS, 1)
    ids = torch.cat([F.pad(one, (0, max(LENGTHS) - one.shape[1])) for one in samples])
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    model.set_attn_implementation(attention)
    together = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
    model.set_attn_implementation("eager")
    alone = [model(input_ids=one, use_cache=False).logits for one in samples]
    rows = [row[None, :length] for row, length in zip(together, LENGTHS, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(rows, alone, strict=True))


def window_fault(config: PretrainedConfig) -> str:
    """``windows`` if FlashAttention would lose the windows of a decoder, ``windows_unchecked`` if no copy of it runs.

    Empty if they are kept, or no layer has one that is shorter than the longest row.
    """
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None)
    if not any(longest is None or window < longest for window in _windows(text)):
        return ""
    try:
        with silent(), torch.no_grad(), torch.random.fork_rng(devices=[]), flash_in_torch() as attention:
            torch.manual_seed(0)
            lost = padded_error(small_copy(text), attention) > LOST
    except HalftuneError:  # FlashAttention refuses the model by itself
        return ""
    except (*REFUSALS, ArithmeticError):  # numbers of heads that do not divide
        return "windows_unchecked"
    return "windows" if lost else ""


def _windows(text: PretrainedConfig) -> list[int]:
    """The windows and chunks that a config names, in tokens."""
    named = [value for key, value in text.to_dict().items() if _WINDOW.search(key)]
    return [value for value in named if isinstance(value, int) and value > 1]
