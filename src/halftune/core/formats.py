"""Our names of the floating-point formats that a run may use."""

from __future__ import annotations

from typing import Literal

Format = Literal["bf16", "fp16", "fp32"]
