"""Names of the floating-point formats of a run."""

from __future__ import annotations

from typing import Literal

Format = Literal["bf16", "fp16", "fp32"]
