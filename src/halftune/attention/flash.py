"""FlashAttention kernels with one signature for dense, padded and packed rows: of the packages (2, 3, 4), or torch's.

Shapes: B batch, T tokens, H query heads, G key/value heads, D head size, N tokens of all samples together.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halftune.core.errors import ModelError
from halftune.core.optional import need

Varlen = Callable[..., torch.Tensor]
"""``(q[N,H,D], k[N,G,D], v[N,G,D], cu_q, cu_k, max_q, max_k, *, dropout, scale, causal, window, softcap) -> [N,H,D]``;
``window`` is (left, right), -1 for unlimited; causality is aligned to the last key."""


def flash_attn_varlen(kernel: Callable[..., Any] | None = None) -> Varlen:
    """Return the varlen kernel of the flash_attn package, or of ``kernel`` with the same signature.

    Its gradients are deterministic if torch's deterministic algorithms are enabled.

    Raises:
        MissingPackageError: the package is not installed.
    """
    if kernel is None:
        kernel = need("flash_attn", why="attention: fa2 by the flash_attn package").flash_attn_varlen_func
    call: Callable[..., Any] = kernel  # type: ignore[assignment]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lengths: Any, **options: Any) -> torch.Tensor:
        return call(
            q,
            k,
            v,
            *lengths,
            dropout_p=options["dropout"],
            softmax_scale=options["scale"],
            causal=options["causal"],
            window_size=options["window"],
            softcap=options["softcap"],
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    return attend


def torch_varlen(kernel: Callable[..., Any] | None = None) -> Varlen:
    """Return torch's FlashAttention-2 kernel, or ``kernel`` with the signature of ``flash_op.flash_varlen``."""
    if kernel is None:
        from halftune.attention.flash_op import flash_varlen as kernel
    call: Callable[..., Any] = kernel  # type: ignore[assignment]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lengths: Any, **options: Any) -> torch.Tensor:
        _refuse("torch's varlen kernel", options, "dropout", "softcap")
        return call(q, k, v, *lengths, options["scale"], *_window(options))[0]

    return attend


def flash_attn_3_varlen(kernel: Callable[..., Any] | None = None) -> Varlen:
    """Return the varlen kernel of FlashAttention-3's package, or of ``kernel`` with the same signature.

    Raises:
        MissingPackageError: the package is not installed.
    """
    if kernel is None:
        package = need("flash_attn_interface", why="attention: fa3", distribution="flash-attn-3")
        kernel = package.flash_attn_varlen_func
    return _later("FlashAttention-3", kernel, -1)  # type: ignore[arg-type]


def flash_attn_4_varlen(kernel: Callable[..., Any] | None = None) -> Varlen:
    """Return the varlen kernel of FlashAttention-4's package, or of ``kernel`` with the same signature.

    Raises:
        MissingPackageError: the package is not installed.
    """
    if kernel is None:
        package = need("flash_attn.cute", why="attention: fa4", distribution="flash-attn-4")
        kernel = package.flash_attn_varlen_func
        warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)  # of its own code, at each compilation
    return _later("FlashAttention-4", kernel, None)  # type: ignore[arg-type]


def _later(name: str, call: Callable[..., Any], unlimited: int | None) -> Varlen:
    """FlashAttention-3 and -4: no dropout; the same names, and a result that may come with its log Σ exp.

    Args:
        name: in messages.
        call: the package's function.
        unlimited: how it writes a window without a limit.
    """

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        max_q: int,
        max_k: int,
        **options: Any,
    ) -> torch.Tensor:
        _refuse(name, options, "dropout")
        found = call(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            softmax_scale=options["scale"],
            causal=options["causal"],
            window_size=tuple(unlimited if side < 0 else side for side in options["window"]),
            softcap=options["softcap"],
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return found[0] if isinstance(found, tuple) else found

    return attend


def _window(options: dict[str, Any]) -> tuple[int, int]:
    """Causality as torch has it: a window that ends at the query."""
    left, right = options["window"]
    return (left, 0) if options["causal"] else (left, right)


def _refuse(kernel: str, options: dict[str, Any], *features: str) -> None:
    """Raise ModelError for options that a kernel does not have."""
    words = {"dropout": "attention dropout", "softcap": "soft-capping"}
    for feature in features:
        if options[feature]:
            what, remedy = f"{kernel} does not support {words[feature]}", "install flash-attn, or set attention: eager"
            raise ModelError(what, remedy=remedy, code="attention.kernel_lacks_feature")


@dataclass(frozen=True)
class Padding:
    """Positions of the real tokens of a padded batch.

    Attributes:
        indices: ``[N]`` int64, real tokens in the flattened ``[B · T]``.
        cu_seq_lens: ``[B + 1]`` int32.
        longest: length of the longest row without padding.
    """

    indices: torch.Tensor
    cu_seq_lens: torch.Tensor
    longest: int

    @staticmethod
    def of(mask: torch.Tensor) -> Padding:
        """Compute from a mask ``[B, T]``, True at real tokens; synchronises with the device."""
        counts = mask.sum(dim=1, dtype=torch.int32)
        cu = nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        return Padding(mask.flatten().nonzero().squeeze(1), cu, int(counts.max()))


class PaddingCache:
    """Caches the padding of the current batch: computed once per query length instead of once per layer."""

    def __init__(self) -> None:
        self._mask: weakref.ref[torch.Tensor] | None = None
        self._found: dict[int, Padding] = {}

    def of(self, mask: torch.Tensor, last: int) -> Padding:
        """Return the padding of the last ``last`` columns of ``mask`` ``[B, T]``."""
        if self._mask is None or self._mask() is not mask:
            self._mask, self._found = weakref.ref(mask), {}
        if last not in self._found:
            self._found[last] = Padding.of(mask[:, -last:])
        return self._found[last]


class FlashAttention:
    """Attention with a varlen kernel, for padded or full batches and for packed rows.

    Args:
        varlen: the kernel.
    """

    def __init__(self, varlen: Varlen) -> None:
        self.varlen = varlen
        self._padding = PaddingCache()

    def batch(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute a batch: ``query`` ``[B, H, T, D]``, ``key``, ``value`` ``[B, G, S, D]``; S > T with a cache.

        ``attention_mask`` is ``[B, S]``, True at real tokens, or None for a full batch. If S > T, the queries are the
        last T positions. Outputs at padding are zero.
        """
        options = _options(module, dropout, scaling, query.shape[2], kwargs)
        rows, _, queries, _ = query.shape
        keys = key.shape[2]
        q, k, v = (_tokens(tensor) for tensor in (query, key, value))
        if attention_mask is None:
            cu_q = torch.arange(0, (rows + 1) * queries, queries, dtype=torch.int32, device=q.device)
            cu_k = torch.arange(0, (rows + 1) * keys, keys, dtype=torch.int32, device=q.device)
            out = self._call(q, k, v, (cu_q, cu_k, queries, keys), options)
            return out.unflatten(0, (rows, queries)), None
        at_k, at_q = self._padding.of(attention_mask, keys), self._padding.of(attention_mask, queries)
        lengths = (at_q.cu_seq_lens, at_k.cu_seq_lens, at_q.longest, at_k.longest)
        out = self._call(q[at_q.indices], k[at_k.indices], v[at_k.indices], lengths, options)
        whole = out.new_zeros(rows * queries, *out.shape[1:]).index_copy(0, at_q.indices, out)
        return whole.unflatten(0, (rows, queries)), None

    def row(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_lens: torch.Tensor,
        max_length: int,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute a packed row: ``query`` ``[1, H, T, D]``, ``key``, ``value`` ``[1, G, T, D]``; does not synchronise.

        Returns:
            ``[1, T, H, D]``.
        """
        options = _options(module, dropout, scaling, query.shape[2], kwargs)
        q, k, v = (_tokens(tensor) for tensor in (query, key, value))
        cu = cu_seq_lens.to(torch.int32).contiguous()
        return self._call(q, k, v, (cu, cu, max_length, max_length), options)[None]

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[Any, ...], options: dict[str, Any]
    ) -> torch.Tensor:
        # Values of latent attention are shorter; the kernel requires one head size.
        short = v.shape[-1]
        if short < q.shape[-1]:
            v = nn.functional.pad(v, (0, q.shape[-1] - short))
        return self.varlen(q, k, v, *lengths, **options)[..., :short]


def _tokens(heads: torch.Tensor) -> torch.Tensor:
    """``[B, H, T, D]`` → ``[B · T, H, D]`` with a contiguous last dimension; a view if the layout allows it."""
    flat = heads.transpose(1, 2).flatten(0, 1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _options(module: nn.Module, dropout: float, scaling: float | None, queries: int, kwargs: Any) -> dict[str, Any]:
    """Convert the arguments of transformers' attention interface to the kernel's options.

    Raises:
        ModelError: the model has attention sinks, which these kernels do not support.
    """
    if kwargs.get("s_aux") is not None:
        what = "FlashAttention does not support attention sinks"
        raise ModelError(what, remedy="set attention: eager", code="attention.kernel_lacks_feature")
    asked = kwargs.get("is_causal")
    causal = (getattr(module, "is_causal", True) if asked is None else asked) and queries > 1
    window = kwargs.get("sliding_window")
    # transformers' window counts the query itself, the kernel's does not; a single query is at the last key
    span = (-1, -1) if window is None else (window - 1, 0 if causal or queries == 1 else window - 1)
    softcap = kwargs.get("softcap") or 0.0
    return {"dropout": dropout, "scale": scaling, "causal": causal, "window": span, "softcap": softcap}
