"""The ``precision`` section: a word, or a word with pins."""

from __future__ import annotations

from typing import ClassVar, Literal

from halftune.config.section import Flag, Section

Request = Literal["auto", "bf16", "fp16", "fp32"]


class PrecisionSection(Section):
    """Number formats. `precision: bf16` is short for `precision: {compute: bf16}`."""

    word: ClassVar[str | None] = "compute"

    compute: Request = "auto"
    """Dtype of matmuls and attention. `auto` takes the best that the device does at full speed."""

    trainable: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the weights that are trained. `auto` is fp32 (master weights)."""

    optimizer_state: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the optimizer's moments; `auto` follows `trainable`."""

    tf32: Flag | Literal["auto"] = "auto"
    """Whether fp32 matmuls may run in TF32 on devices that have it. `auto` allows it only where compute is not fp32."""

    on_unsupported: Literal["error", "fallback"] = "error"
    """What to do when the device cannot run the dtype asked for: stop before loading, or take the next best."""
