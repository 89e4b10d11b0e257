"""Packed rows in transformers: no dense mask is built for them, and no layer may mix their samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import masking_utils

from halftune.attention.varlen import Attention
from halftune.core.errors import ModelError

_packed: ContextVar[bool] = ContextVar("packed", default=False)


@contextmanager
def known_packed(packed: bool) -> Iterator[None]:
    """Inside, a row is taken for packed where ``packed``; transformers would ask the device whether it is."""
    if not packed:
        yield
        return
    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _sample_indices
    before = _packed.set(True)
    try:
        yield
    finally:
        _packed.reset(before)
        masking_utils.find_packed_sequence_indices = found


def _sample_indices(position_ids: torch.Tensor) -> torch.Tensor:
    """The number of each token's sample ``[B, T]``, from positions that restart at each sample."""
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


class PackedRowMasks:
    """Skips dense masks for packed rows, and checks that every layer passes sample boundaries to attention.

    transformers detects packed rows by their position ids and would build a dense mask. ``cu_seq_lens_q`` replaces it,
    but only if the model's layers pass it to attention; otherwise samples would attend to each other.
    """

    def __init__(self) -> None:
        self._row_without_mask = False

    def mask(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``build`` to return None for packed rows."""

        @functools.wraps(build)
        def mask_or_none(
            *,
            batch_size: int,
            q_length: int,
            kv_length: int,
            attention_mask: torch.Tensor | None = None,
            allow_is_causal_skip: bool = True,
            use_vmap: bool = False,
            **kwargs: Any,
        ) -> Any:
            # One row without mask and cache for which plain causality is not enough: packed samples.
            row = batch_size == 1 and attention_mask is None and q_length == kv_length and not use_vmap
            self._row_without_mask = row and q_length > 1 and not allow_is_causal_skip
            # gpt-oss makes its masks without positions: they show no samples
            if self._row_without_mask or (row and _packed.get()):
                return None
            return build(
                batch_size=batch_size,
                q_length=q_length,
                kv_length=kv_length,
                attention_mask=attention_mask,
                allow_is_causal_skip=allow_is_causal_skip,
                use_vmap=use_vmap,
                **kwargs,
            )

        return mask_or_none

    def attention(self, attend: Attention) -> Attention:
        """Wrap ``attend`` to raise ModelError for a packed row without boundaries or with a model's own mask."""

        @functools.wraps(attend)
        def checked(
            module: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            *options: Any,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            without_bounds = attention_mask is None and kwargs.get("cu_seq_lens_q") is None
            if self._row_without_mask and without_bounds and getattr(module, "is_causal", True):
                raise ModelError(
                    f"{type(module).__name__} does not pass sample boundaries of packed rows to attention",
                    remedy="data.packing: false",
                    code="attention.packing_unsupported",
                )
            if self._row_without_mask and attention_mask is not None:
                # The backends of packed rows take boundaries instead of masks: the model's mask would be ignored.
                raise ModelError(
                    f"{type(module).__name__} uses its own attention mask, which packed rows do not support",
                    remedy="data.packing: false",
                    code="attention.packing_unsupported",
                )
            return attend(module, query, key, value, attention_mask, *options, **kwargs)

        return checked
