"""The attention backends of a run, with the reasons against the others."""

from __future__ import annotations

from dataclasses import dataclass

from halftune.core.choice import Choice


@dataclass(frozen=True)
class AttentionPlan:
    """The attention backends of a run.

    Attributes:
        softmax: ``fa2 | fa3 | fa4 | sdpa | flex | eager``.
        provider: the package with the code: ``flash_attn``, ``torch``, ``transformers``, or ``model`` (the model's own
            attention code, without transformers' attention interface).
        varlen: method for packed rows: ``segments`` (SDPA or eager per sample, CPU and old GPUs), ``torch_varlen``,
            ``flash_attn_varlen``; ``none`` without packing.
        linear: backend of linear-attention layers: ``halftune | fla | torch``; ``none`` if the model has no such layer.
        rejected: (backend, reason) of every other backend.
        guard: ``cast | strict | off``.
        rejected_linear: (backend, reason) of every other backend of linear-attention layers.
    """

    softmax: Choice[str]
    provider: Choice[str]
    varlen: Choice[str]
    linear: Choice[str]
    rejected: tuple[tuple[str, str], ...]
    guard: str
    rejected_linear: tuple[tuple[str, str], ...] = ()
