"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) on the model's own answers.

With the log-probability ``log π(t)`` of a token of an answer, and the answer's advantage A, the loss of the token is
``-A · π(t) / sg(π(t)) + β · k``, where ``sg`` stops the gradient. The answers are sampled by the weights that the step
changes, so the ratio is 1 and clipping it has no effect. ``k = exp(d) - d - 1`` with ``d = log ρ(t) - log π(t)``
estimates the KL divergence to the reference ρ (http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import torch

from halftune.config.sections.method import GrpoMethod
from halftune.data.batch import WEIGHT, Batch
from halftune.data.store import Example
from halftune.methods import AdapterOff, Loss, Reference
from halftune.model.policy import PolicyModel

ADVANTAGES = "advantages"  # a column of batches: fp32 [S], of each answer
REWARD, MEASURED = "reward", ("reward", "reward_std", "completion_length", "truncated")


def advantages(rewards: torch.Tensor, *, scale: bool, leave_one_out: bool) -> torch.Tensor:
    """The advantages of answers.

    Args:
        rewards: ``[E, G]``, of the G answers to each prompt.
        scale: divide by the standard deviation of a prompt's rewards.
        leave_one_out: compare with the mean of the other answers, not of all.

    Returns:
        ``[E, G]``.
    """
    number = rewards.shape[1]
    found = rewards - rewards.mean(dim=1, keepdim=True)
    if leave_one_out:
        found = found * number / (number - 1)
    return found / (rewards.std(dim=1, keepdim=True) + 1e-4) if scale else found


class Grpo:
    """A mean over tokens, answers or both, see ``loss`` in the section. The evaluation loss is the negative reward."""

    def __init__(self, section: GrpoMethod) -> None:
        self.section = section
        names = [one.function for one in section.rewards] if len(section.rewards) > 1 else []
        self.metrics = (*MEASURED, *(f"reward_{name}" for name in names), *(("kl",) if section.beta else ()))

    def weight(self, example: Example) -> float:
        """Of a prompt, which has no labels yet; ``train.rollout`` sets the weights of answers."""
        return 0.0

    def group_weight(self, trained: int) -> float:
        """What the answers to a prompt weigh; ``trained`` is their number of labels."""
        return float(trained if self.section.loss == "dapo" else self.section.num_generations)

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum over tokens; without gradients, the negative rewards of the answers."""
        section, columns = self.section, batch.columns
        measured = {name: (columns[name].sum(), columns[name].new_tensor(float(len(columns[name])))) for name in
                    self.metrics if name in columns}  # fmt: skip
        zero = columns[WEIGHT].new_zeros(())
        metrics = {name: measured.get(name, (zero, zero)) for name in self.metrics}
        if not torch.is_grad_enabled():
            return Loss(-(columns[REWARD] * columns[WEIGHT]).sum(), metrics)
        values = policy.token_logprobs(batch, section.temperature)
        if not batch.examples:
            return Loss(values.sum(), metrics)
        owners, advantage = policy.label_segments(batch), columns[ADVANTAGES]
        losses = -(values - values.detach()).exp() * advantage[owners]
        if section.beta:
            assert isinstance(reference, AdapterOff)
            apart = reference.token_logprobs(batch, section.temperature) - values
            kl = apart.exp() - apart - 1
            losses = losses + section.beta * kl
            metrics["kl"] = (kl.detach().sum().to(zero.dtype), zero + kl.numel())
        if section.loss == "grpo":
            losses = losses / torch.bincount(owners, minlength=len(advantage))[owners]
        elif section.loss == "dr_grpo":
            losses = losses / section.max_completion_length
        return Loss(losses.sum(), metrics)
