"""The ``generation`` section: how `halftune chat` and the report's samples are decoded."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from halftune.config.section import Int, Number, Section


class GenerationSection(Section):
    """Decoding."""

    max_new_tokens: Annotated[Int, Field(ge=1)] = 256
    """Longest answer in tokens."""

    temperature: Annotated[Number, Field(ge=0)] = 0.0
    """0 decodes greedily."""

    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""

    top_k: Annotated[Int, Field(ge=0)] = 0
    """Sample among the k likeliest tokens; 0 for all."""

    repetition_penalty: Annotated[Number, Field(gt=0)] = 1.0
    """Above 1 makes repetition less likely."""
