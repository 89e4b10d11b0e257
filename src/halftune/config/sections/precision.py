"""The ``precision`` section: number formats."""

from __future__ import annotations

from typing import ClassVar, Literal

from halftune.config.section import Flag, Section

Request = Literal["auto", "bf16", "fp16", "fp32"]


class PrecisionSection(Section):
    """Number formats. `precision: bf16` is short for `precision: {compute: bf16}`."""

    word: ClassVar[str | None] = "compute"

    compute: Request = "auto"
    """Dtype of matmuls and attention. `auto`: the best that the device runs at full speed."""

    trainable: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the trained weights. `auto`: fp32 (master weights)."""

    optimizer_state: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the optimizer's moments; `auto` follows `trainable`."""

    tf32: Flag | Literal["auto"] = "auto"
    """Whether fp32 matmuls may use TF32. `auto`: only if compute is not fp32."""

    on_unsupported: Literal["error", "fallback"] = "error"
    """If the device does not support the requested dtype: stop before loading, or use the choice of `auto`."""
