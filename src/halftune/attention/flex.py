"""Flex attention of packed rows: one call per row, with a block mask of the samples' boundaries.

Serves what FlashAttention does not have: soft-capped scores and attention sinks. transformers' own block masks are not
used: they hold for models that hand positions on to them, take a square of the row's length in memory, and give
windows a kernel of their own. Shapes: H query heads, G key/value heads (H a multiple of G), T tokens of the row, D head
size of q and k, E of v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch._dynamo.config as settings
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from halftune.core.errors import ModelError

BLOCK = 128  # tokens: flex attention's own default
# Compilations that a model may need: for the first row, for other lengths and numbers of blocks, for rows of one block
# or one token; with and without gradients. Windows and boundaries are data and need none.
COMPILATIONS = 8
_MODELS = 8  # of a process


@dataclass(frozen=True)
class RowMask:
    """What the tokens of a packed row see.

    Attributes:
        cu_seq_lens: ``[N + 1]`` integers from 0 to T.
        window: tokens visible to each token, itself included; None for all.
        causal: whether a token sees no later one.
        blocks: the same for flex attention.
    """

    cu_seq_lens: Tensor
    window: int | None
    causal: bool
    blocks: BlockMask


def row_mask(cu_seq_lens: Tensor, length: int, window: int | None, *, causal: bool) -> RowMask:
    """Make the mask of a row of ``length`` tokens; does not synchronise.

    Each token sees one stretch of the row, whose ends grow along the row. So blocks are found from the ends alone, in
    (T / 128)² steps, where ``create_block_mask`` evaluates T².
    """
    bounds, position = cu_seq_lens.long(), torch.arange(length, device=cu_seq_lens.device)
    after = torch.searchsorted(bounds, position, right=True)
    first, last = bounds[after - 1], position if causal else bounds[after] - 1
    if window is not None:
        first, last = torch.maximum(first, position - window + 1), torch.minimum(last, position + window - 1)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[query] <= key) & (key <= last[query])

    start = position[::BLOCK]
    end = start + BLOCK - 1
    inside = end.clamp(max=length - 1)
    touched = (first[start, None] <= inside) & (start <= last[inside, None])
    full = (first[inside, None] <= start) & (end <= last[start, None]) & (end[:, None] < length)
    blocks = BlockMask.from_kv_blocks(
        *_listed(touched & ~full), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )
    return RowMask(cu_seq_lens, window, causal, blocks)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number and indices of each row's blocks, ``[1, 1, n]`` and ``[1, 1, n, n]``, from ``[n, n]`` booleans."""
    indices = blocks.int().argsort(descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], indices.int()[None, None]


class FlexRows:
    """Attention of packed rows; makes each mask of a batch once, not once per layer."""

    def __init__(self) -> None:
        self._bounds: Tensor | None = None
        self._masks: dict[tuple[int | None, bool], RowMask] = {}

    @torch.compiler.disable(recursive=False)  # has a compiled kernel of its own
    def row(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_lens: Tensor,
        longest: int,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute a packed row: ``query`` ``[1, H, T, D]``, ``key`` ``[1, G, T, D]``, ``value`` ``[1, G, T, E]``.

        Args:
            module: the attention module.
            query, key, value: of one dtype.
            cu_seq_lens: ``[N + 1]`` integers from 0 to T.
            longest: tokens of the longest sample.
            dropout: must be 0.
            scaling: of the scores; None for D^-½.
            softcap: limit of the scores; None for none.
            s_aux: ``[H]`` logits of attention sinks.
            sliding_window: tokens visible to each token, itself included.
            is_causal: default: the module's.

        Returns:
            ``[1, T, H, E]``, contiguous, in the query's dtype.

        Raises:
            ModelError: dropout is not 0.
        """
        if dropout:
            what = f"{type(module).__name__}: flex attention does not support dropout"
            raise ModelError(what, remedy="set attention: eager", code="attention.kernel_lacks_feature")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = None if sliding_window is None or sliding_window >= longest else sliding_window
        mask = self._mask(cu_seq_lens, query.shape[2], window, causal)
        with _recompilations():  # not of the whole process: training.torch_compile has its own limit
            out, log_sums = attend(query, key, value, mask, scaling, softcap, log_sums=s_aux is not None)
        if s_aux is not None:  # a sink adds exp(s_aux) to the sum of exponentials, which stays in fp32
            out = (out * torch.sigmoid(log_sums - s_aux[:, None])[..., None]).to(query.dtype)
        return out.transpose(1, 2).contiguous()

    @torch.compiler.disable()
    def _mask(self, cu_seq_lens: Tensor, length: int, window: int | None, causal: bool) -> RowMask:
        if self._bounds is not cu_seq_lens:
            self._bounds, self._masks = cu_seq_lens, {}
        if (window, causal) not in self._masks:
            self._masks[window, causal] = row_mask(cu_seq_lens, length, window, causal=causal)
        return self._masks[window, causal]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: RowMask,
    scale: float | None,
    softcap: float | None,
    *,
    log_sums: bool,
) -> tuple[Tensor, Any]:
    """Call flex attention: the output ``[1, H, T, E]``, and log Σ exp of the scores ``[1, H, T]``, if asked for."""
    out, found = kernel()(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask.blocks,
        scale=scale,
        enable_gqa=True,
        kernel_options={"BACKEND": "TRITON"},  # the one for decoding would be another variant for short rows
        return_aux=AuxRequest(lse=log_sums),
    )
    return out, found.lse


def _capped(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


@cache
def kernel() -> Callable[..., Any]:
    """flex_attention, compiled; as a full graph, which fails where torch would go on with a dense square of scores."""
    return torch.compile(flex_attention, fullgraph=True)


@cache
def _recompilations() -> Any:
    """A context in which this thread may compile flex attention as often as all models need."""
    return settings.patch(recompile_limit=COMPILATIONS * _MODELS)
