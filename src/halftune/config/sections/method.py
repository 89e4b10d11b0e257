"""The ``method`` section: what is learned from a sample, a tagged union on ``type``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from halftune.config.section import TYPED, Section


class SftMethod(Section):
    """Supervised fine-tuning on conversations."""

    type: Literal["sft"] = "sft"
    """Supervised fine-tuning."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens carry a label: every assistant turn, the last assistant turn only, or the whole rendering."""


class PretrainMethod(Section):
    """Continued pre-training on plain text: every token is trained, documents are cut into `data.max_length` pieces."""

    type: Literal["pretrain"]
    """Causal language modelling on plain text."""


MethodSection = Annotated[SftMethod | PretrainMethod, Field(discriminator="type"), TYPED]
