"""The ``attention`` section: which backend, how strict the guard in front of it."""

from __future__ import annotations

from typing import ClassVar, Literal

from halftune.config.section import Section

Backend = Literal["auto", "fa2", "fa3", "fa4", "sdpa", "flex", "eager"]


class AttentionSection(Section):
    """Softmax and linear attention. `attention: sdpa` is short for `attention: {backend: sdpa}`."""

    word: ClassVar[str | None] = "backend"

    backend: Backend = "auto"
    """Softmax-attention backend. `auto` takes the fastest that device, dtype and model allow; the plan says why."""

    linear: Literal["auto", "halftune", "fla", "torch"] = "auto"
    """Backend of linear-attention layers (gated delta rule, Mamba-2, short convolutions …) where the model has them:
    halftune's own operators, flash-linear-attention, or transformers' torch code, which cannot pack rows."""

    guard: Literal["cast", "strict", "off"] = "cast"
    """An operand that left the planned dtype on its way into attention is cast and logged, raises, or is ignored."""
