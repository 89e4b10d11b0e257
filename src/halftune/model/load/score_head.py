"""The score head of a reward model: one output, computed in fp32 at every token."""

from __future__ import annotations

from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.model.tokenizer.vocabulary import padding_id
from halftune.plan.weights.score_head import SCORE

log = get_logger(__name__)


class ScoreHead(nn.Linear):
    """A linear layer with one output, computed in fp32 (fp64 for fp64 weights) even under autocast.

    bf16 would round a score to three digits, and losses compare scores.

    Attributes:
        tokens: the scores ``[B, T, 1]`` of the last forward pass.
    """

    tokens: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Scores ``[B, T, 1]`` of hidden states ``[B, T, H]``."""
        wide = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(wide)
            self.tokens = F.linear(input.to(wide), self.weight.to(wide), bias)
        return self.tokens


def install(model: PreTrainedModel, section: ModelSection, seed: int, *, new: bool) -> None:
    """Replace the model's ``score`` layer by a :class:`ScoreHead`, and name the padding token in the config.

    transformers scores the last token that differs from the config's padding token.

    Args:
        model: a sequence classifier with one output.
        section: names the tokenizer.
        seed: of new weights; the global random state does not change.
        new: draw weights as transformers does: normal, with the config's ``initializer_range``.

    Raises:
        ModelError: the model has no such layer.
    """
    head = getattr(model, SCORE, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        what = f"{type(model).__name__} has no layer {SCORE!r} with one output"
        raise ModelError(what, remedy="use a Llama, Qwen, Mistral or Gemma", code="model.no_score_head")
    head.__class__ = ScoreHead
    if new:
        std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.empty(head.weight.shape).normal_(std=std, generator=generator)
        head.weight = nn.Parameter(drawn.to(head.weight.dtype), requires_grad=head.weight.requires_grad)
        log.info("new score head: %d weights, normal with standard deviation %g", drawn.numel(), std)
    model.config.get_text_config().pad_token_id = padding_id(model, load_tokenizer(section))


def token_scores(base: Any) -> torch.Tensor:
    """The scores ``[B, T, 1]`` of the last forward pass of a model, under peft or not; they are given once."""
    head: Any = getattr(base, SCORE)
    if isinstance(head, ModulesToSaveWrapper):
        head = head.modules_to_save[head.active_adapters[0]]
    tokens, head.tokens = head.tokens, None
    assert tokens is not None
    return tokens
