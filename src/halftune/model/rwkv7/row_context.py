"""Per-batch information for all RWKV-7 layers: padding, sample boundaries and the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

TIME, CHANNEL = 0, 1  # indices of a layer's two mixings in the cache


class RecurrentCache(DynamicCache):
    """The states of all layers, and the number of tokens seen, for ``generate``.

    Attributes:
        seen: tokens of each row, padding included.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens seen."""
        return self.seen

    @property
    def is_compileable(self) -> bool:
        """No: ``generate`` would build masks for softmax attention."""
        return False


@dataclass(frozen=True)
class RowContext:
    """Padding, boundaries and cache of a batch.

    Attributes:
        mask_BT1: 1 for tokens and 0 for padding; None without padding.
        starts_BT1: first tokens of samples in a packed row; None if each row is one sample.
        cu_seqlens: [N + 1] boundaries of a packed row's samples.
        seq_idx: [B, T] sample indices, if ``cu_seqlens`` is None.
        cache: the cache of generation; None for packed rows.
    """

    mask_BT1: torch.Tensor | None
    starts_BT1: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    seq_idx: torch.Tensor | None
    cache: Cache | None

    def without_padding(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """Set padding to zero, so that it does not affect the state."""
        return x_BTH if self.mask_BT1 is None else x_BTH * self.mask_BT1.to(x_BTH.dtype)

    def previous(self, x_BTH: torch.Tensor, layer: int, mixing: int) -> torch.Tensor:
        """The preceding token of each token, zeros at sample starts. The cache keeps the last token."""
        if self.cache is None:
            before_BTH = F.pad(x_BTH[:, :-1], (0, 0, 1, 0))
            return before_BTH if self.starts_BT1 is None else before_BTH.masked_fill(self.starts_BT1, 0)
        known = self.cache.update_conv_state(x_BTH.mT, layer, mixing, conv_kernel_size=1).mT
        length = x_BTH.shape[1]
        return known[:, :length] if known.shape[1] > length else F.pad(x_BTH[:, :-1], (0, 0, 1, 0))


def describe_row(x_BTH: torch.Tensor, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> RowContext:
    """Build the context from the arguments of a forward pass, without a cache.

    Args:
        x_BTH: the embedded tokens.
        attention_mask: [B, all tokens so far], 1 or 0.
        kwargs: ``cu_seqlens``, ``cu_seq_lens_q`` or ``seq_idx`` of a packed row; others are ignored.
    """
    tokens = x_BTH.shape[1]
    bounds: torch.Tensor | None = kwargs.get("cu_seqlens")
    if bounds is None:
        bounds = kwargs.get("cu_seq_lens_q")
    numbers: torch.Tensor | None = kwargs.get("seq_idx") if bounds is None else None
    starts_BT1 = None
    if bounds is not None:
        # one extra element: an empty sample at the end starts after the last token
        starts_T = torch.zeros(tokens + 1, dtype=torch.bool, device=x_BTH.device).index_fill(0, bounds.long(), True)
        starts_BT1 = starts_T[None, :tokens, None]
    elif numbers is not None:
        starts_BT1 = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)[..., None]
    # a newly generated token is not padding
    mask = attention_mask[:, -tokens:, None] if attention_mask is not None and tokens > 1 else None
    return RowContext(mask, starts_BT1, bounds, numbers, None)
