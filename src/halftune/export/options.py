"""What was asked of an export, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halftune.core.choice import Format

GgufType = Literal["f16", "bf16", "q8_0"]
Quantised = Literal["nf4", "int8", "fp8", "int8-wo"]


@dataclass(frozen=True)
class Options:
    """What to write, and where.

    Attributes:
        output: the folder.
        target: a name of ``targets.TARGETS``.
        dtype: format of a plain folder; default the base checkpoint's.
        gguf_type: of a GGUF file.
    """

    output: Path
    target: str = "folder"
    dtype: Format | None = None
    gguf_type: GgufType = "bf16"

    @property
    def name(self) -> str:
        """The model's name: that of the folder."""
        return self.output.resolve().name
