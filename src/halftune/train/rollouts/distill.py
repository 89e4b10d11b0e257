"""On-policy distillation: the model learns the teacher's probabilities of its own answers (GKD, arXiv:2306.13649)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from halftune.config.sections.method import DistillMethod
from halftune.data.batch import Batch
from halftune.data.store import Example, Segment
from halftune.methods.distill import SAMPLED
from halftune.train.batches.feed import Feed
from halftune.train.rollouts.sampling import Answer, Sampler
from halftune.train.state import TrainState


@dataclass(frozen=True)
class _Settings:
    """How a student samples; ``temperature`` of the section is that of the divergence."""

    max_completion_length: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0


class DistillRollouts:
    """Replaces the last answer of a share of the examples by the model's own. Which ones depends on the seed, the step
    and the example only. An example whose prompt leaves no room in ``data.max_length`` keeps its answer.

    Args:
        run: its model answers.
    """

    def __init__(self, run: TrainState) -> None:
        assert isinstance(run.config.method, DistillMethod)
        self.run, self.section = run, run.config.method
        longest, temperature = self.section.max_completion_length, float(self.section.sampling_temperature)
        self.sampler = Sampler(run, _Settings(longest, temperature))

    def __call__(self, batches: list[Batch], feed: Feed) -> list[Batch]:
        """See ``Rollouts``. Evaluation is on the data's answers."""
        return batches if feed.evaluation else [self._answered(batch, feed) for batch in batches]

    def _answered(self, batch: Batch, feed: Feed) -> Batch:
        examples = {index: feed.split.example(index) for index in batch.examples}
        prompts = {index: one.segments[0].prompt for index, one in examples.items() if self._chosen(index, feed)}
        room = self.run.config.data.max_length - self.section.max_completion_length
        prompts = {index: prompt for index, prompt in prompts.items() if 0 < len(prompt) <= room}
        seeds = [self.sampler.seed(index, 0, feed) for index in prompts]
        answers: Sequence[Answer] = self.sampler(list(prompts.values()), seeds)
        if not prompts:
            return batch
        for (index, prompt), answer in zip(prompts.items(), answers, strict=True):
            labelled = np.arange(len(prompt) + len(answer.ids)) >= len(prompt)
            examples[index] = Example((Segment(np.concatenate([prompt, answer.ids]), labelled),))
        made = [examples[index] for index in batch.examples]
        weights = [self.run.method.weight(one) for one in made]
        sampled = {SAMPLED: torch.tensor([float(index in prompts) for index in batch.examples])}
        return feed.batch_of(made, weights, sampled, batch.examples, packed=feed.packing)

    def _chosen(self, index: int, feed: Feed) -> bool:
        return self.sampler.seed(index, -1, feed) / (1 << 56) < self.section.on_policy
