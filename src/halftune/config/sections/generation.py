"""The ``generation`` section: decoding of `halftune chat` and the report's samples."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from halftune.config.section import Int, Number, Section


class GenerationSection(Section):
    """Decoding."""

    max_new_tokens: Annotated[Int, Field(ge=1)] = 256
    """Maximum number of generated tokens."""

    temperature: Annotated[Number, Field(ge=0)] = 0.0
    """Sampling temperature; 0: greedy decoding."""

    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Top-p (nucleus) sampling."""

    top_k: Annotated[Int, Field(ge=0)] = 0
    """Top-k sampling; 0: all tokens."""

    repetition_penalty: Annotated[Number, Field(gt=0)] = 1.0
    """Repetition penalty; values above 1 make repetition less likely."""
