"""Starts the kernels of a chunked recurrence, and makes what all of them keep between the passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from halftune_kernels.arguments import Segments, chunk_table, segment_table
from halftune_kernels.launch import Config, Rows, ceil_div, dot_precision, power_of_two, start
from halftune_kernels.scan import delta_kernels
from halftune_kernels.scan.cuts import configuration

CHUNK = 64
BLOCK = 16  # rows between which decays of their own for each channel have factors
_BY_ROW = Config(width=0, warps=4, stages=1)  # of the kernels that go row by row


class ChunkLaunch:
    """The launches of one call. Every kernel gets those of the sizes that it has parameters for.

    Attributes:
        sizes: H key heads, HV value heads, K and V channels, BK those of the keys padded, and what all kernels share.
        chunks: [chunks, 4], for the kernels of a chunk.
        samples: [N, 4], for the scans.

    Args:
        operator: whose kernels they are.
        configs: their cuts.
        q: [B, T, H, K].
        v: [B, T, HV, V].
        segments: samples of the rows.
    """

    def __init__(
        self,
        operator: str,
        configs: Mapping[tuple[str, bool], Rows],
        q: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
    ) -> None:
        self._operator, self._configs, self._like, self._count = operator, configs, q, segments.count
        (groups, keys), (heads, values) = q.shape[2:], v.shape[2:]
        self.sizes: dict[str, Any] = {"H": groups, "HV": heads, "K": keys, "V": values, "BK": power_of_two(keys)}
        self.sizes |= {"C": CHUNK, "R": BLOCK, "PRECISION": dot_precision(q.dtype)}
        self.chunks, self.samples = chunk_table(segments, CHUNK, q.device), segment_table(segments, CHUNK, q.device)

    def cut(self, kernel: Any) -> Config:
        """How ``kernel`` is cut."""
        return configuration(self._configs, self._operator, kernel.__name__, self._like, self.sizes["BK"])

    def by_chunk(self, kernel: Any, *given: Any, parts: int = 1) -> None:
        """Start a program for each chunk, value head and one of ``parts``."""
        cut, padded = self.cut(kernel), power_of_two(self.sizes["V"])
        tiles = {"BV": padded, "TV": min(cut.width, padded), "TK": min(cut.depth, self.sizes["BK"])}
        self._start(kernel, (len(self.chunks), self.sizes["HV"], parts), cut, given, tiles)

    def scan(self, kernel: Any, *given: Any) -> None:
        """Start a program for each sample, value head and tile of values."""
        cut = self.cut(kernel)
        grid = (ceil_div(self.sizes["V"], cut.width) * self.sizes["HV"] * self._count,)
        self._start(kernel, grid, cut, given, {"BV": cut.width})

    def _start(
        self, kernel: Any, grid: tuple[int, ...], cut: Config, given: tuple[Any, ...], more: dict[str, Any]
    ) -> None:
        sizes = self.sizes | more
        start(kernel, grid, cut, *given, **{name: sizes[name] for name in kernel.arg_names if name in sizes})

    def norms(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """1 / norm of the rows of q and k, [B, T, H]."""
        rq, rk = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
        rows, tall = rq.numel(), max(1, 2048 // self.sizes["BK"])
        self._start(delta_kernels.norms, (ceil_div(rows, tall),), _BY_ROW, (q, k, rq, rk, rows), {"M": tall})
        return rq, rk

    def reduce_heads(
        self, q: torch.Tensor, k: torch.Tensor, dqs: torch.Tensor, dks: torch.Tensor, *, normalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of q and k from those of each value head, [B, T, HV, K]."""
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        rows, tall = q.shape[0] * q.shape[1], max(1, 2048 // self.sizes["BK"])
        given, grid = (q, k, dqs, dks, dq, dk, rows), (ceil_div(rows, tall), self.sizes["H"], 2)
        self._start(delta_kernels.reduce_heads, grid, _BY_ROW, given, {"M": tall, "NORM": normalise})
        return dq, dk

    def states_of_chunks(self) -> torch.Tensor:
        """For the states before each chunk, or their gradients; fp16 would overflow where little decays."""
        dtype = torch.float32 if self._like.dtype == torch.float16 else self._like.dtype
        return self._states(len(self.chunks), dtype)

    def states_of_samples(self) -> torch.Tensor:
        """For the final states."""
        return self._states(self._count, torch.float32)

    def _states(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._like.new_empty(count, *(self.sizes[name] for name in ("HV", "K", "V")), dtype=dtype)

    def scan_channels(
        self,
        made: tuple[torch.Tensor | None, ...],
        v: torch.Tensor,
        initial: torch.Tensor | None,
        keep: bool,
        want: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The scan of a decay of its own for each channel.

        Args:
            made: what it reads beside the states; see `delta_kernels.scan_forward`.
            v: [B, T, HV, V].
            initial: states before the samples; zeros if None.
            keep: the third and the fourth result, for the backward pass.
            want: the second.

        Returns:
            Output, final states, N and the states before each chunk; None where not asked for.
        """
        o, final = torch.empty_like(v), self.states_of_samples() if want else None
        new, states = (torch.empty_like(v), self.states_of_chunks()) if keep else (None, None)
        self.scan(delta_kernels.scan_forward, *made, o, new, states, initial, final, self.samples)
        return o, final, new, states

    def scan_channels_back(
        self,
        made: tuple[torch.Tensor, ...],
        do: torch.Tensor,
        dfinal: torch.Tensor | None,
        initial: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Gradients of N, of the states after each chunk and of the initial ones, fp32."""
        dn, dstates, dinitial = torch.empty_like(do), self.states_of_chunks(), gradient_of(initial)
        self.scan(delta_kernels.scan_backward, *made, do, dn, dstates, dfinal, dinitial, self.samples)
        return dn, dstates, dinitial


def contiguous(*tensors: torch.Tensor | None) -> list[Any]:
    """All of them; None stays None."""
    return [None if x is None else x.contiguous() for x in tensors]


def of_output(do: torch.Tensor | None, v: torch.Tensor) -> torch.Tensor:
    """The gradient of an output like ``v``; zeros if it was not used."""
    return torch.zeros_like(v) if do is None else do.to(v.dtype).contiguous()


def gradient_of(initial: torch.Tensor | None) -> torch.Tensor | None:
    """For the gradient of the initial states, if there are any; fp32."""
    return None if initial is None else torch.empty_like(initial, dtype=torch.float32)


def as_given(gradient: torch.Tensor | None, initial: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of the initial states in their dtype."""
    return None if gradient is None or initial is None else gradient.to(initial.dtype)


def keep(ctx: Any, scale: float, segments: Segments, *tensors: torch.Tensor | None) -> None:
    """Keep for the backward pass, which is to be told of results that were not used."""
    ctx.save_for_backward(*tensors)
    ctx.scale, ctx.segments = scale, segments
    ctx.set_materialize_grads(False)
