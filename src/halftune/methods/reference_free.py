"""Preference methods without a reference model.

With a chosen answer c and a rejected one r, ``p(y) = log π(y)`` in nats and ``p̄(y)`` the mean of it per token:

- SimPO (Meng et al. 2024, arXiv:2405.14734, eq. 6): ``-log σ(β · (p̄(c) - p̄(r)) - γ)``
- ORPO (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7): ``-p̄(c) - β · log σ(o(c) - o(r))``, with the log-odds
  ``o(y) = p̄(y) - log(1 - exp p̄(y))``
- CPO (Xu et al. 2024, arXiv:2401.08417, eq. 3 to 6): ``-log σ(β · (p(c) - p(r)))``

SimPO and CPO add ``-α · p̄(c)``, with the weight α of supervised fine-tuning.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from halftune.config.sections.method import CpoMethod, OrpoMethod, SimpoMethod
from halftune.data.batch import Batch
from halftune.methods import Loss, Reference
from halftune.methods.pairs import PairMethod, split
from halftune.model.policy.policy import PolicyModel


class Simpo(PairMethod):
    """SimPO; rewards are ``β · p̄``."""

    def __init__(self, section: SimpoMethod) -> None:
        self.section = section

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum of the pairs' losses."""
        section = self.section
        chosen, rejected = split(_means(policy, batch))
        losses = -logsigmoid(section.beta * (chosen - rejected) - section.gamma) - section.sft_weight * chosen
        return self.total(batch, losses, section.beta * chosen, section.beta * rejected)


class Orpo(PairMethod):
    """ORPO; rewards are ``β · p̄``."""

    def __init__(self, section: OrpoMethod) -> None:
        self.beta = section.beta

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum of the pairs' losses."""
        chosen, rejected = split(_means(policy, batch))
        odds = (chosen - _log_of_rest(chosen)) - (rejected - _log_of_rest(rejected))
        return self.total(batch, -chosen - self.beta * logsigmoid(odds), self.beta * chosen, self.beta * rejected)


class Cpo(PairMethod):
    """CPO; rewards are ``β · p``."""

    def __init__(self, section: CpoMethod) -> None:
        self.section = section

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum of the pairs' losses."""
        section = self.section
        sums = policy.sequence_logprobs(batch)
        chosen, rejected = split(section.beta * sums)
        tokens = policy.label_counts(batch).clamp(min=1)
        losses = -logsigmoid(chosen - rejected) - section.sft_weight * split(sums / tokens)[0]
        return self.total(batch, losses, chosen, rejected)


def _means(policy: PolicyModel, batch: Batch) -> Tensor:
    """Mean log-probability per token of each segment ``[2N]``; 0 without labels."""
    return policy.sequence_logprobs(batch) / policy.label_counts(batch).clamp(min=1)


def _log_of_rest(mean: Tensor) -> Tensor:
    """``log(1 - exp p̄)``; finite where the answer is nearly certain, as p̄ is at most -1e-6 here."""
    return torch.log(-torch.expm1(mean.clamp(max=-1e-6)))
