"""Drives a recurrence over chunks of rows, forward and backward: what the chunked operators of the delta family share.

Rows are taken in chunks, and chunks that do not depend on each other (heads, samples) together: few enough to stay in
the processor's cache, so that memory sees inputs, outputs and one state per chunk only. Everything else is recomputed
in the backward pass, but for what fits into `KEPT_BYTES`: short rows then cost no second forward pass. An operator may
be handed several chunks that follow each other, and do at once for all of them what does not depend on the state: few
large calls in place of many small ones, which torch's threads cannot share.

Shapes: R rows, H heads, N samples, U units (samples × heads that are computed together), L chunks that follow each
other, C rows of a chunk, K key size, W width of the state's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from halftune_kernels.arguments import Segments, without_autocast
from halftune_kernels.constants import constant
from halftune_kernels.memory import KEPT_BYTES

Tensors = Sequence[torch.Tensor]
LEAST_DECAY = -1e4  # exp of it is 0; logarithms below it, -inf among them, would only cost digits of the others


class Chunks(NamedTuple):
    """What the backward pass of an operator gets.

    Attributes:
        inputs: as in the forward pass.
        state: as in the forward pass.
        d_out: [L * U, C, ...] gradient of the output.
        d_state: [going, K, W] gradient of the leaving state, None if ``going`` is 0.
        kept: third result of the forward pass; empty if it was not kept.
        count: L.
    """

    inputs: Tensors
    state: torch.Tensor | None
    d_out: torch.Tensor
    d_state: torch.Tensor | None
    kept: Tensors
    count: int


class ChunkOperator(Protocol):
    """Chunks of a recurrence. Every tensor is fp32 (fp64 if the inputs are); rows past a sample's end are zeros."""

    def forward(
        self, inputs: Tensors, state: torch.Tensor | None, going: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, Tensors]:
        """Output, leaving state and what the backward pass would have to compute again.

        Args:
            inputs: [L * U, C, ...] each.
            state: [U, K, W] entering the first chunk; None is zeros.
            going: the state leaving the last chunk is wanted of so many units, the first ones.
            count: L; 1 if `chunk_scan` was not asked for more.

        Returns:
            [L * U, C, ...] and [going, K, W], None if ``going`` is 0; any tensors, which nobody writes to any more.
        """
        ...

    def backward(self, chunks: Chunks) -> tuple[Tensors, torch.Tensor | None]:
        """Gradients of the inputs and of the entering state (None where that is None)."""
        ...


@dataclass(frozen=True)
class Chunk:
    """Rows of several samples at one place, and at the places after it if all samples fill those chunks.

    Attributes:
        count: L.
        live: samples of the block that have rows here, always the first ones.
        going: those of them that have rows after the last of the chunks.
        length: C.
        rows: the rows, [L * live * C]; a slice for a single sample. Rows past the end of a sample repeat its last row.
        padding: [live, C] true past the end of a sample; None if no row is.
        kept: [m] positions in ``rows`` that are no padding; None if all are kept.
    """

    count: int
    live: int
    going: int
    length: int
    rows: slice | torch.Tensor
    padding: torch.Tensor | None
    kept: torch.Tensor | None


@dataclass(frozen=True)
class Block:
    """Samples and heads that are computed together.

    Attributes:
        segments: [n] sample numbers, the longest first.
        heads: which heads.
        chunks: in order.
    """

    segments: torch.Tensor
    heads: slice
    chunks: tuple[Chunk, ...]


class Plan(NamedTuple):
    """What `chunk_scan` makes, and in which pieces.

    Attributes:
        segments: the samples.
        shape: of the output after [R, H].
        dtype: of the output.
        state: K, W.
        want_final: whether the final state is returned.
        chunk: C.
        units: samples × heads that are computed together, about.
        together: most chunks that follow each other and are handed to the operator at once.
        power_of_two: fill every chunk up to a power of two (``chunk`` is one).
    """

    segments: Segments
    shape: tuple[int, ...]
    dtype: torch.dtype
    state: tuple[int, int]
    want_final: bool
    chunk: int
    units: int
    together: int = 1
    power_of_two: bool = False


@constant(64)
def plan_blocks(plan: Plan, heads: int, device: torch.device) -> tuple[Block, ...]:
    """Cuts the work of an operator of ``heads`` heads into blocks; zero-length samples are in none."""
    segments, units = plan.segments, plan.units
    wide = min(heads, units)
    longest_first = sorted(
        (n for n, length in enumerate(segments.lengths) if length), key=lambda n: -segments.lengths[n]
    )
    beside = max(1, units // wide)
    groups = [longest_first[first : first + beside] for first in range(0, len(longest_first), beside)]
    blocks = []
    for group in groups:
        chunks = tuple(_chunks(plan, group, device))
        numbers = torch.tensor(group, device=device)
        blocks += [Block(numbers, slice(h, min(h + wide, heads)), chunks) for h in range(0, heads, wide)]
    return tuple(blocks)


def _chunks(plan: Plan, group: list[int], device: torch.device) -> list[Chunk]:
    segments, chunk = plan.segments, plan.chunk
    lengths = torch.tensor([segments.lengths[n] for n in group])
    starts = torch.tensor([segments.bounds[n] for n in group])
    place, chunks = 0, []
    while place < int(lengths[0]):
        here = int((lengths > place).sum())
        left = lengths[:here] - place
        count = max(1, min(int(left[-1]) // chunk, plan.together))
        going = int((lengths > place + count * chunk).sum())
        size = min(chunk, int(left[0]))
        if plan.power_of_two:
            size = 1 << (size - 1).bit_length()
        if here == 1 and size <= int(left[0]):
            first = int(starts[0]) + place
            chunks.append(Chunk(count, 1, going, size, slice(first, first + count * size), None, None))
        else:
            offset = torch.arange(count)[:, None, None] * size + torch.arange(size)
            padding = (offset >= left[:, None]).flatten(0, 1)
            rows = (starts[:here, None] + place + torch.minimum(offset, left[:, None] - 1)).flatten().to(device)
            some = bool(padding.any())
            kept = (~padding).flatten().nonzero().flatten().to(device) if some else None
            chunks.append(Chunk(count, here, going, size, rows, padding.to(device) if some else None, kept))
        place += count * chunk
    return chunks


def chunk_scan(
    operator: ChunkOperator, inputs: Tensors, initial_state: torch.Tensor | None, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs ``operator`` over all samples and heads; differentiable in ``inputs`` and ``initial_state``.

    Args:
        operator: the recurrence.
        inputs: [R, H, ...] each, any floating dtype.
        initial_state: [N, H, K, W], or None for zeros.
        plan: what is made.

    Returns:
        [R, H, ...] and the final state [N, H, K, W] in the dtype of the computation, None if not wanted.
    """
    return _Scan.apply(operator, plan, initial_state, *inputs)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: ChunkOperator, plan: Plan, initial: Any, *inputs: torch.Tensor) -> Any:
        rows, heads = inputs[0].shape[:2]
        dtype = compute_dtype(inputs[0])
        out = torch.empty(rows, heads, *plan.shape, dtype=plan.dtype, device=inputs[0].device)
        final: torch.Tensor | None = None
        blocks = plan_blocks(plan, heads, inputs[0].device)
        room = KEPT_BYTES // max(1, len(blocks)) if any(ctx.needs_input_grad) else None
        if plan.want_final:  # a sample without rows ends as it began
            final = out.new_zeros(plan.segments.count, heads, *plan.state, dtype=dtype)
            if initial is not None:
                final.copy_(initial)
        kept = []
        for block in blocks:
            kept += _block_forward(operator, block, inputs, initial, dtype, out, final, room)
        saved = [tensor for entering, tensors in kept for tensor in (*entering, *tensors)]
        ctx.counts = [(len(entering), len(tensors)) for entering, tensors in kept]
        ctx.operator, ctx.plan, ctx.dtype, ctx.has_initial = operator, plan, dtype, initial is not None
        ctx.initial_shape, ctx.initial_dtype = (None, None) if initial is None else (initial.shape, initial.dtype)
        ctx.save_for_backward(*inputs, *saved)
        return out, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx: Any, d_out: torch.Tensor, d_final: torch.Tensor | None) -> Any:
        # once: gradient checkpointing recomputes what is asked for, and refuses to do so twice
        tensors = ctx.saved_tensors
        count = len(tensors) - sum(map(sum, ctx.counts))
        inputs, saved = tensors[:count], iter(tensors[count:])
        entered = [(next(saved) if known else None, list(islice(saved, kept))) for known, kept in ctx.counts]
        heads, dtype = inputs[0].shape[1], ctx.dtype
        grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]
        d_initial = None
        if ctx.has_initial:  # a sample without rows hands its final state's gradient on
            d_initial = d_final.clone() if d_final is not None else d_out.new_zeros(ctx.initial_shape, dtype=dtype)
        first = 0
        for block in plan_blocks(ctx.plan, heads, inputs[0].device):
            mine = entered[first : first + len(block.chunks)]
            first += len(block.chunks)
            _block_backward(ctx.operator, block, inputs, mine, dtype, d_out, d_final, grads, d_initial)
        return None, None, None if d_initial is None else d_initial.to(ctx.initial_dtype), *grads


def _block_forward(
    operator: ChunkOperator,
    block: Block,
    inputs: Tensors,
    initial: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor,
    final: torch.Tensor | None,
    room: int | None,
) -> list[tuple[Tensors, Tensors]]:
    """Fills a block's part of ``out`` and ``final``.

    Returns:
        The entering state, if there is one, and what is kept, of each chunk; nothing if ``room``, in bytes, is None.
    """
    state, wide, kept = _entering(initial, block, dtype), block.heads.stop - block.heads.start, []
    for piece in block.chunks:
        entering = () if state is None else (state,)
        going = piece.live if final is not None else piece.going
        loaded = [load(tensor, piece, block.heads, dtype) for tensor in inputs]
        result, state, passed = operator.forward(loaded, state, going * wide, piece.count)
        if room is not None:
            size = sum(tensor.nbytes for tensor in passed)
            passed = passed if size <= room else ()
            room -= size if passed else 0
            kept.append((entering, passed))
        store(out, piece, block.heads, result)
        if final is not None:
            assert state is not None
            ended = state[piece.going * wide :].unflatten(0, (-1, wide))
            final[block.segments[piece.going : piece.live], block.heads] = ended
            state = state[: piece.going * wide]
    return kept


def _block_backward(
    operator: ChunkOperator,
    block: Block,
    inputs: Tensors,
    entered: Sequence[tuple[torch.Tensor | None, Tensors]],
    dtype: torch.dtype,
    d_out: torch.Tensor,
    d_final: torch.Tensor | None,
    grads: Tensors,
    d_initial: torch.Tensor | None,
) -> None:
    """Fills a block's part of ``grads`` and ``d_initial``."""
    wide = block.heads.stop - block.heads.start
    d_state: torch.Tensor | None = None
    for piece, (state, kept) in zip(reversed(block.chunks), reversed(entered), strict=True):
        if d_final is not None:
            ended = d_final[block.segments[piece.going : piece.live], block.heads].to(dtype).flatten(0, 1)
            d_state = ended if d_state is None else torch.cat((d_state, ended))
        loaded = [load(tensor, piece, block.heads, dtype) for tensor in inputs]
        gradient = load(d_out, piece, block.heads, dtype)
        found, d_state = operator.backward(Chunks(loaded, state, gradient, d_state, kept, piece.count))
        for grad, value in zip(grads, found, strict=True):
            store(grad, piece, block.heads, value)
    if d_initial is not None:
        assert d_state is not None
        d_initial[block.segments, block.heads] = d_state.unflatten(0, (-1, wide)).to(d_initial.dtype)


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """fp64 stays fp64, everything else is computed in fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _entering(initial: torch.Tensor | None, block: Block, dtype: torch.dtype) -> torch.Tensor | None:
    return None if initial is None else initial[block.segments, block.heads].to(dtype).flatten(0, 1).contiguous()


def load(tensor: torch.Tensor, chunk: Chunk, heads: slice, dtype: torch.dtype) -> torch.Tensor:
    """[L * U, C, ...] of [R, H, ...]; zeros past the end of a sample; a view of one chunk if nothing is converted."""
    if isinstance(chunk.rows, slice):
        return tensor[chunk.rows, heads].unflatten(0, (chunk.count, -1)).transpose(1, 2).to(dtype).flatten(0, 1)
    taken = tensor[:, heads].index_select(0, chunk.rows).unflatten(0, (-1, chunk.length)).to(dtype)
    if chunk.padding is not None:
        taken.masked_fill_(chunk.padding.reshape(*chunk.padding.shape, *[1] * (taken.dim() - 2)), 0.0)
    return taken.transpose(1, 2).flatten(0, 1)


def store(into: torch.Tensor, chunk: Chunk, heads: slice, value: torch.Tensor) -> None:
    """Writes [L * U, C, ...] to its rows and heads of [R, H, ...]."""
    if isinstance(chunk.rows, slice):
        target = into[chunk.rows, heads].unflatten(0, (chunk.count, -1))
        target.copy_(value.unflatten(0, (chunk.count, -1)).transpose(1, 2))
        return
    by_row = value.unflatten(0, (chunk.count * chunk.live, -1)).transpose(1, 2).to(into.dtype).flatten(0, 1)
    if chunk.kept is not None:
        into[:, heads].index_copy_(0, chunk.rows[chunk.kept], by_row.index_select(0, chunk.kept))
    else:
        into[:, heads].index_copy_(0, chunk.rows, by_row)
