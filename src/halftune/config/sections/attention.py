"""The ``attention`` section: backends and the dtype guard."""

from __future__ import annotations

from typing import ClassVar, Literal

from halftune.config.section import Section

Backend = Literal["auto", "fa2", "fa3", "fa4", "sdpa", "flex", "eager"]


class AttentionSection(Section):
    """Softmax and linear attention. `attention: sdpa` is short for `attention: {backend: sdpa}`."""

    word: ClassVar[str | None] = "backend"

    backend: Backend = "auto"
    """Softmax-attention backend. `auto`: the fastest that device, dtype and model support; the plan has the reason."""

    linear: Literal["auto", "halftune", "fla", "torch"] = "auto"
    """Backend of linear-attention layers (gated delta rule, Mamba-2, short convolutions …) where the model has them:
    halftune's own operators, flash-linear-attention, or transformers' torch code, which cannot pack rows."""

    guard: Literal["cast", "strict", "off"] = "cast"
    """Attention operands outside the planned dtype are cast and logged, raise an error, or are ignored."""
