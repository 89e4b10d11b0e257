"""Which attention backends a run uses, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

from halftune.core.choice import Choice


@dataclass(frozen=True)
class AttentionPlan:
    """The routes of a run.

    Attributes:
        softmax: ``fa2 | fa3 | fa4 | sdpa | flex | eager``.
        provider: what carries it out: ``flash_attn`` (the package), ``torch`` (its own kernels), ``transformers``,
            ``model`` (code of its own, past transformers' attention interface).
        varlen: how packed rows are computed, ``none`` when packing is off: ``segments`` (SDPA or eager per sample,
            CPU and old GPUs), ``torch_varlen``, ``flash_attn_varlen``.
        linear: backend of linear-attention layers, ``none`` where the model has none: ``halftune | fla | torch``.
        rejected: (backend, reason) of every backend that was not taken.
        guard: ``cast | strict | off``.
        rejected_linear: (backend, reason) of every backend of linear-attention layers that was not taken.
    """

    softmax: Choice[str]
    provider: Choice[str]
    varlen: Choice[str]
    linear: Choice[str]
    rejected: tuple[tuple[str, str], ...]
    guard: str
    rejected_linear: tuple[tuple[str, str], ...] = ()
