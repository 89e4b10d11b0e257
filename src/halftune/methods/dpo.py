"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), and losses on the same quantities.

``Δ(y) = log π(y) - log ρ(y)`` is the log-ratio of an answer y, with the model in training π and the reference ρ, the
model before training. The sigmoid loss of a chosen answer c and a rejected one r is ``-log σ(β · (Δ(c) - Δ(r)))``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from halftune.config.sections.method import DpoMethod
from halftune.data.batch import Batch
from halftune.methods import Loss, Reference
from halftune.methods.pairs import PairMethod, split
from halftune.model.policy.policy import PolicyModel


@dataclass(frozen=True)
class Ratios:
    """Log-ratios of N pairs in nats.

    Attributes:
        chosen, rejected: Δ of the answers ``[N]``.
        chosen_tokens, rejected_tokens: their numbers of tokens ``[N]``.
        beta: strength of the constraint to the reference.
        smoothing: assumed share of pairs in the wrong order.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    beta: float
    smoothing: float

    @property
    def margin(self) -> Tensor:
        """β · (Δ(c) - Δ(r))."""
        return self.beta * (self.chosen - self.rejected)

    @property
    def mean_margin(self) -> Tensor:
        """The difference of the log-ratios per token."""
        return self.chosen / self.chosen_tokens - self.rejected / self.rejected_tokens


def _sigmoid(pairs: Ratios) -> Tensor:
    """With smoothing: arXiv:2305.18290v3, appendix (conservative DPO)."""
    wrong = pairs.smoothing
    return -(1 - wrong) * logsigmoid(pairs.margin) - wrong * logsigmoid(-pairs.margin)


def _robust(pairs: Ratios) -> Tensor:
    """Unbiased where a known share of the pairs is in the wrong order (arXiv:2403.00409, eq. 11)."""
    wrong = pairs.smoothing
    return (wrong * logsigmoid(-pairs.margin) - (1 - wrong) * logsigmoid(pairs.margin)) / (1 - 2 * wrong)


def _exo_pair(pairs: Ratios) -> Tensor:
    """Reverse KL divergence to the smoothed preference (arXiv:2402.00856, eq. 16)."""
    first, second = logsigmoid(pairs.margin), logsigmoid(-pairs.margin)
    return first.exp() * (first - math.log1p(-pairs.smoothing)) + second.exp() * (second - math.log(pairs.smoothing))


def _nca_pair(pairs: Ratios) -> Tensor:
    """Noise-contrastive alignment (arXiv:2402.05369)."""
    chosen, rejected = pairs.beta * pairs.chosen, pairs.beta * pairs.rejected
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


# The value of method.loss → the loss of each pair [N].
LOSSES: dict[str, Callable[[Ratios], Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    # arXiv:2309.06657
    "hinge": lambda pairs: torch.relu(1 - pairs.margin),
    # arXiv:2310.12036, eq. 17, per token as the authors' code has it
    "ipo": lambda pairs: (pairs.mean_margin - 1 / (2 * pairs.beta)).square(),
    # arXiv:2411.15124: DPO per token
    "sigmoid_norm": lambda pairs: -logsigmoid(pairs.beta * pairs.mean_margin),
    # arXiv:2404.04656, without the shift of the rewards
    "bco_pair": lambda pairs: -logsigmoid(pairs.beta * pairs.chosen) - logsigmoid(-pairs.beta * pairs.rejected),
    # arXiv:2405.00675, eq. 4.7 with probabilities 1 and 0
    "sppo_hard": lambda pairs: (
        (pairs.chosen - 0.5 / pairs.beta).square() + (pairs.rejected + 0.5 / pairs.beta).square()
    ),
    # arXiv:2408.06266, eq. 7 and 8
    "apo_zero": lambda pairs: 1 - torch.sigmoid(pairs.beta * pairs.chosen) + torch.sigmoid(pairs.beta * pairs.rejected),
    "apo_down": lambda pairs: torch.sigmoid(pairs.beta * pairs.chosen) + 1 - torch.sigmoid(pairs.margin),
}


class Dpo(PairMethod):
    """Mean of one of the losses over pairs."""

    def __init__(self, section: DpoMethod) -> None:
        self.section = section
        self.of_pairs = LOSSES[section.loss]

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum of the pairs' losses; rewards are ``β · Δ`` in nats."""
        section = self.section
        known = reference.sequence_logprobs(batch)
        found = policy.sequence_logprobs(batch)
        tokens = split(policy.label_counts(batch).clamp(min=1))
        pairs = Ratios(*split(found - known), *tokens, section.beta, section.label_smoothing)
        losses = self.of_pairs(pairs)
        if section.sft_weight:
            losses = losses - section.sft_weight * split(found)[0] / pairs.chosen_tokens
        return self.total(batch, losses, section.beta * pairs.chosen, section.beta * pairs.rejected)
