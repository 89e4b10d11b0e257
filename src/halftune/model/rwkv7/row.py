"""What every layer of an RWKV-7 is told about a batch: padding, where samples begin, and the states of the past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

TIME, CHANNEL = 0, 1  # the two mixings of a layer, as the cache counts their last tokens


class States(DynamicCache):
    """The states of all layers, and how many tokens they have seen, which ``generate`` asks for.

    Attributes:
        seen: tokens of each row, padding included.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the states have seen."""
        return self.seen

    @property
    def is_compileable(self) -> bool:
        """No: ``generate`` would build masks for softmax attention."""
        return False


@dataclass(frozen=True)
class Row:
    """A batch.

    Attributes:
        mask_BT1: 1 for tokens and 0 for padding; None without padding.
        starts_BT1: whether a token begins a sample of a packed row; None where rows are samples.
        cu_seqlens: [N + 1] boundaries of a packed row's samples.
        seq_idx: [B, T] numbers of the samples, where there are no ``cu_seqlens``.
        cache: of generation, read and written; never beside samples of a packed row.
    """

    mask_BT1: torch.Tensor | None
    starts_BT1: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    seq_idx: torch.Tensor | None
    cache: Cache | None

    def without_padding(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """Padding as zeros: it then leaves no trace in a state."""
        return x_BTH if self.mask_BT1 is None else x_BTH * self.mask_BT1.to(x_BTH.dtype)

    def previous(self, x_BTH: torch.Tensor, layer: int, mixing: int) -> torch.Tensor:
        """The token before each, zeros before a sample's first. The last one is remembered for generation."""
        if self.cache is None:
            before_BTH = F.pad(x_BTH[:, :-1], (0, 0, 1, 0))
            return before_BTH if self.starts_BT1 is None else before_BTH.masked_fill(self.starts_BT1, 0)
        known = self.cache.update_conv_state(x_BTH.mT, layer, mixing, conv_kernel_size=1).mT
        length = x_BTH.shape[1]
        return known[:, :length] if known.shape[1] > length else F.pad(x_BTH[:, :-1], (0, 0, 1, 0))


def describe_row(x_BTH: torch.Tensor, attention_mask: torch.Tensor | None, handed_on: dict[str, Any]) -> Row:
    """The row from the arguments of a forward pass, without a cache.

    Args:
        x_BTH: the embedded tokens.
        attention_mask: [B, all tokens so far], 1 or 0.
        handed_on: ``cu_seqlens``, ``cu_seq_lens_q`` or ``seq_idx`` of a packed row, and what else a collator gives.
    """
    tokens = x_BTH.shape[1]
    bounds: torch.Tensor | None = handed_on.get("cu_seqlens")
    if bounds is None:
        bounds = handed_on.get("cu_seq_lens_q")
    numbers: torch.Tensor | None = handed_on.get("seq_idx") if bounds is None else None
    starts_BT1 = None
    if bounds is not None:
        # one place more: an empty sample at the end begins after the last token
        starts_T = torch.zeros(tokens + 1, dtype=torch.bool, device=x_BTH.device).index_fill(0, bounds.long(), True)
        starts_BT1 = starts_T[None, :tokens, None]
    elif numbers is not None:
        starts_BT1 = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)[..., None]
    # a token that was just made is no padding
    mask = attention_mask[:, -tokens:, None] if attention_mask is not None and tokens > 1 else None
    return Row(mask, starts_BT1, bounds, numbers, None)
