"""The ``adapter`` section: full fine-tuning or LoRA, a tagged union on ``type``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from halftune.config.section import LISTED, TYPED, Flag, Int, Number, Section


class NoAdapter(Section):
    """Full fine-tuning: every weight is trained."""

    type: Literal["none"]
    """No adapter."""


class LoraAdapter(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on frozen weights."""

    type: Literal["lora"] = "lora"
    """LoRA."""

    rank: Annotated[Int, Field(ge=1)] = 16
    """Rank r of the update B·A."""

    alpha: Annotated[Number, Field(gt=0)] = 32.0
    """The update is scaled by alpha / rank (rsLoRA: alpha / sqrt(rank))."""

    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout in front of A."""

    target_modules: Literal["all-linear"] | str | tuple[str, ...] = "all-linear"
    """`all-linear` (every linear layer but the head), a list of module-name endings, or one regular expression."""

    modules_to_save: Annotated[tuple[str, ...], LISTED] = ()
    """Modules trained in full and saved with the adapter, e.g. `[embed_tokens, lm_head]` after adding tokens."""

    use_rslora: Flag = False
    """Rank-stabilised scaling (Kalajdzievski 2023, arXiv:2312.03732)."""

    use_dora: Flag = False
    """Weight-decomposed LoRA (Liu et al. 2024, arXiv:2402.09353)."""


AdapterSection = Annotated[NoAdapter | LoraAdapter, Field(discriminator="type"), TYPED]
