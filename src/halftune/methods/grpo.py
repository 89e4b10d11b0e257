"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) on the model's own answers.

A token of an answer has the probability ``π(t)``, ``π_0(t)`` with the weights that sampled the answer, and the ratio
``r = π(t) / π_0(t)``. With the answer's advantage A, its loss is
``-min(r · A, clip(r, 1 - ε, 1 + ε_high) · A) + β · k``. In the first update on a batch of answers, r is 1.
``k = exp(d) - d - 1`` with ``d = log ρ(t) - log π(t)`` estimates the KL divergence to the reference ρ
(http://joschu.net/blog/kl-approx.html). Where a server sampled with ``μ``, the first term has the weight
``min(π_0(t) / μ(t), max_weight)`` (truncated importance sampling).
"""

from __future__ import annotations

import itertools

import torch

from halftune.config.sections.method import GrpoMethod
from halftune.data.batch import WEIGHT, Batch
from halftune.data.store import Example
from halftune.methods import AdapterOff, Loss, Method
from halftune.model.policy.policy import PolicyModel

ADVANTAGES = "advantages"  # a column of batches: fp32 [S], of each answer
SAMPLED = "sampled_logprobs"  # a column of batches: fp32 [K], the labels' log-probabilities before the first update
SERVED = "served_logprobs"  # a column of batches: fp32 [K], by the server that sampled them; NaN: not known
REWARD, MEASURED = "reward", ("reward", "reward_std", "equal_rewards", "completion_length", "truncated")
DROPPED = "dropped"  # a column of batches: fp32 [E], whether the group is left out


def reward_metrics(section: GrpoMethod) -> list[str]:
    """The metric of each reward function: by its name, with a number where a metric has it; none of a single one."""
    found: list[str] = []
    for one in section.rewards if len(section.rewards) > 1 else ():
        numbered = (f"reward_{one.function}_{number}" for number in itertools.count(2))
        each = itertools.chain([f"reward_{one.function}"], numbered)
        found.append(next(name for name in each if name not in (*MEASURED, *found)))
    return found


def level(rewards: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Rewards ``[..., G]``, made equal for a prompt whose judged answers are at most ``bound`` ``[...]`` apart.

    Advantages are relative, and so are Adam's steps: a difference by rounding would train like a real one.
    """
    judged = ~rewards.isnan()
    largest = torch.where(judged, rewards, -torch.inf).amax(dim=-1, keepdim=True)
    smallest = torch.where(judged, rewards, torch.inf).amin(dim=-1, keepdim=True)
    equal = judged & (largest - smallest <= bound[..., None])
    return torch.where(equal, largest, rewards)


def spread(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Number, mean and standard deviation ``[E]`` of the judged answers to each prompt; NaN where there are too few.

    Args:
        rewards: ``[E, G]``; NaN for an answer that no function judged.
    """
    number, mean, apart = _centred(rewards)
    squares = apart.square().nansum(dim=1)
    return number, mean, (squares / torch.where(number > 1, number - 1, torch.nan)).sqrt()


def advantages(rewards: torch.Tensor, *, scale: bool, leave_one_out: bool) -> torch.Tensor:
    """The advantages of answers; 0 for one that is not judged, and for all of a group with fewer than two that are.

    Args:
        rewards: ``[E, G]``, of the G answers to each prompt; NaN for an answer that no function judged.
        scale: divide by the standard deviation of a prompt's rewards.
        leave_one_out: compare with the mean of the other answers, not of all.

    Returns:
        fp64 ``[E, G]``; exactly 0 for equal rewards.
    """
    number, _, found = _centred(rewards)
    number = number[:, None]
    if leave_one_out:
        found = found * number / (number - 1)
    if scale:
        found = found / (spread(rewards)[2][:, None] + 1e-4)
    return torch.where(rewards.isnan() | (number < 2), 0.0, found)


def _centred(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Number and mean ``[E]`` of the judged answers, and their rewards minus the mean: fp64 ``[E, G]``.

    The mean is taken of the differences from one of them: the mean of equal numbers may be one bit off.
    """
    judged, rewards = ~rewards.isnan(), rewards.double()
    one = torch.where(judged, rewards, -torch.inf).amax(dim=1, keepdim=True)
    apart = torch.where(judged, rewards - one, torch.nan)
    mean = apart.nanmean(dim=1, keepdim=True)
    return judged.sum(dim=1), (one + mean)[:, 0], apart - mean


class Grpo(Method):
    """A mean over tokens, answers or both, see ``loss`` in the section. The evaluation loss is the negative reward."""

    def __init__(self, section: GrpoMethod) -> None:
        self.section = section
        more = ("entropy", *((DROPPED,) if section.dynamic_sampling else ()), *(("kl",) if section.beta else ()))
        more = (*more, *(("clip_fraction",) if section.num_iterations > 1 else ()))
        more = (*more, *(("server_weight", "server_gap") if section.server is not None else ()))
        self.metrics, self.updates = (*MEASURED, *reward_metrics(section), *more), section.num_iterations

    def weight(self, example: Example) -> float:
        """Of a prompt, which has no labels yet; ``train.rollouts`` sets the weights of answers."""
        return 0.0

    def group_weight(self, trained: int) -> float:
        """What the answers to a prompt weigh; ``trained`` is their number of labels."""
        return float(trained if self.section.loss == "dapo" else self.section.num_generations)

    def evaluate(self, policy: PolicyModel, batch: Batch, reference: AdapterOff) -> Loss:
        """Sum of the negative rewards of the answers."""
        columns, weights = batch.columns, batch.columns[WEIGHT]
        rewards = columns.get(REWARD, weights)  # a batch that keeps processes in step has no answers, and weighs 0
        return Loss(-(rewards.nan_to_num() * weights).sum(), self._measured(columns))

    def loss(self, policy: PolicyModel, batch: Batch, reference: AdapterOff) -> Loss:
        """Sum over tokens. ``columns`` are the log-probabilities before the first update on the answers."""
        section, columns = self.section, batch.columns
        metrics, zero = self._measured(columns), columns[WEIGHT].new_zeros(())
        values, entropies = policy.token_logprobs_and_entropies(batch, section.temperature)
        metrics["entropy"] = (entropies.sum().to(zero.dtype), zero + len(entropies))
        known = None
        if section.beta:  # a sharded model needs all processes in each forward pass
            known = reference.token_logprobs(batch, section.temperature)
        if not len(values) or not batch.examples:
            return Loss(values.sum(), metrics)
        owners = policy.label_segments(batch)
        lengths, advantage = torch.bincount(owners, minlength=len(columns[ADVANTAGES])), columns[ADVANTAGES][owners]
        sampled = columns.get(SAMPLED, values.detach())  # in the first update, by the weights that sampled the answers
        ratio = self._ratio(values - sampled, owners, lengths)
        low, high = 1 - section.epsilon, 1 + (section.epsilon_high or section.epsilon)
        losses = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if SERVED in columns:
            losses = losses * self._server_weights(sampled - columns[SERVED], metrics)
        if known is not None:
            apart = known - values
            kl = apart.exp() - apart - 1
            losses = losses + section.beta * kl
            metrics["kl"] = (kl.detach().sum().to(zero.dtype), zero + kl.numel())
        if "clip_fraction" in metrics:
            clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
            metrics["clip_fraction"] = (clipped.sum().to(zero.dtype), zero + clipped.numel())
        if section.loss != "dapo":
            losses = losses / (lengths[owners] if section.loss == "grpo" else section.max_completion_length)
        return Loss(losses.sum(), metrics, {SAMPLED: sampled})

    def _measured(self, columns: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Sum and count of each metric's column, NaN left out; zeros where the batch has none."""
        zero = columns[WEIGHT].new_zeros(())
        found = dict.fromkeys(self.metrics, (zero, zero))
        for name in found.keys() & columns.keys():
            column = columns[name]
            found[name] = (column.nansum(), (~column.isnan()).sum().to(column.dtype))
        return found

    def _server_weights(
        self, apart: torch.Tensor, metrics: dict[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Truncated importance weights ``[K]`` from differences of our log-probabilities to the server's."""
        assert self.section.server is not None
        apart, cap = apart.nan_to_num(), self.section.server.max_weight
        weights = torch.ones_like(apart) if cap is None else apart.exp().clamp(max=cap)
        zero = metrics[REWARD][0].new_zeros(())
        for name, value in (("server_weight", weights), ("server_gap", apart.abs())):
            metrics[name] = (value.sum().to(zero.dtype), zero + value.numel())
        return weights

    def _ratio(self, apart: torch.Tensor, owners: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Probability ratios ``[K]``, from differences of log-probabilities."""
        if self.section.importance_sampling == "sequence":
            apart = (torch.zeros_like(lengths, dtype=apart.dtype).index_add(0, owners, apart) / lengths)[owners]
        return apart.exp()
