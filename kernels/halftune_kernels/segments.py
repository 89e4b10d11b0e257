"""Sample boundaries in a batch, and the division of samples into chunks.

Every operator works on the rows of a flattened [B*T] batch: a batch of B rows of length T is a packed row with
boundaries 0, T, 2T ..., so packing needs no special case.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from itertools import pairwise

import torch

from halftune_kernels.arguments import ArgumentError

_READ: dict[int, tuple[weakref.ref[torch.Tensor], int, tuple[int, ...]]] = {}


@dataclass(frozen=True)
class Segments:
    """Samples as consecutive runs of rows.

    Attributes:
        bounds: N + 1 non-decreasing row indices, from 0 to B*T. Empty segments are allowed.
    """

    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of segments N."""
        return len(self.bounds) - 1

    @property
    def rows(self) -> int:
        """Number of rows B*T."""
        return self.bounds[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each segment."""
        return tuple(end - start for start, end in pairwise(self.bounds))


def find_segments(
    operator: str,
    batch: int,
    length: int,
    cu_seqlens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> Segments:
    """Return the segments of a [batch, length] input.

    Args:
        operator: name for errors.
        batch: B.
        length: T.
        cu_seqlens: [N + 1] int32 or int64 boundaries of the samples in the one row of a packed batch (B = 1).
        seq_idx: [B, T] integers; a sample begins where the value changes. Only without ``cu_seqlens``.

    Raises:
        ArgumentError: wrong dtype or shape, both given, B > 1 with ``cu_seqlens``, or invalid boundaries.
    """
    for name, given in (("cu_seqlens", cu_seqlens), ("seq_idx", seq_idx)):
        if given is not None and not isinstance(given, torch.Tensor):
            raise ArgumentError(operator, name, came=f"a {type(given).__name__}", expected="a tensor of integers")
    if cu_seqlens is not None and seq_idx is not None:
        raise ArgumentError(operator, "seq_idx", came="given with cu_seqlens", expected="one of the two")
    if cu_seqlens is not None:
        return _of_one_row(operator, batch, length, cu_seqlens)
    if seq_idx is not None:
        if tuple(seq_idx.shape) != (batch, length) or seq_idx.dtype.is_floating_point:
            came = f"{seq_idx.dtype} of shape {list(seq_idx.shape)}"
            raise ArgumentError(
                operator, "seq_idx", came=came, expected=f"integers of shape [B, T] = [{batch}, {length}]"
            )
        if length:
            return Segments(_read(seq_idx, changes=True))
    return Segments(tuple(range(0, batch * length + 1, length)) if length else (0,) * (batch + 1))


def _of_one_row(operator: str, batch: int, length: int, cu_seqlens: torch.Tensor) -> Segments:
    if batch != 1:
        raise ArgumentError(operator, "batch size", came=batch, expected="1 with cu_seqlens (one packed row)")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        came = f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        raise ArgumentError(operator, "cu_seqlens", came=came, expected="int32 or int64 of shape [N + 1], N >= 1")
    bounds = _read(cu_seqlens)
    if bounds[0] != 0 or bounds[-1] != length:
        came = f"from {bounds[0]} to {bounds[-1]}"
        raise ArgumentError(operator, "cu_seqlens", came=came, expected=f"from 0 to T = {length}")
    fall = next((i for i, (start, end) in enumerate(pairwise(bounds)) if end < start), None)
    if fall is not None:
        came = f"falling at {fall + 1}: {bounds[fall]} then {bounds[fall + 1]}"
        raise ArgumentError(operator, "cu_seqlens", came=came, expected="never falling")
    return Segments(bounds)


def _read(tensor: torch.Tensor, changes: bool = False) -> tuple[int, ...]:
    """Boundaries on the host; remembered per tensor, so that a model's layers wait for the device once, not each.

    Not of the CPU, where nothing waits: numpy may write there, which no version counts. Nor of inference tensors,
    which count none.
    """
    remembered = tensor.device.type != "cpu" and not tensor.is_inference()
    known = _READ.get(id(tensor)) if remembered else None
    if known is not None and known[0]() is tensor and known[1] == tensor._version:
        return known[2]
    if changes:
        batch, length = tensor.shape
        new = torch.ones(batch, length, dtype=torch.bool, device=tensor.device)
        new[:, 1:] = tensor[:, 1:] != tensor[:, :-1]
        bounds = (*new.flatten().nonzero().flatten().tolist(), batch * length)
    else:
        bounds = tuple(tensor.tolist())
    if remembered:
        number = id(tensor)
        _READ[number] = (weakref.ref(tensor, lambda _: _READ.pop(number, None)), tensor._version, bounds)
    return bounds


@functools.lru_cache(maxsize=32)
def chunk_table(segments: Segments, chunk: int, device: torch.device) -> torch.Tensor:
    """[NC, 4] int32 for kernels: segment, chunk within the segment, first row of the segment, rows of the segment."""
    table = [
        (n, place, segments.bounds[n], length)
        for n, length in enumerate(segments.lengths)
        for place in range(-(-length // chunk))
    ]
    return torch.tensor(table, dtype=torch.int32).reshape(-1, 4).to(device)


@functools.lru_cache(maxsize=32)
def segment_table(segments: Segments, chunk: int, device: torch.device) -> torch.Tensor:
    """[N, 4] int32 for kernels: segment, its first chunk in `chunk_table`, first row, rows; longest segment first."""
    table, first = [], 0
    for n, length in enumerate(segments.lengths):
        table.append((n, first, segments.bounds[n], length))
        first += -(-length // chunk)
    return torch.tensor(sorted(table, key=lambda row: -row[3]), dtype=torch.int32).to(device)
