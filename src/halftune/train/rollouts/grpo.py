"""Answers of the model in training to the prompts of a batch, with their rewards and advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from halftune.config.sections.method import GrpoMethod
from halftune.core.log import get_logger
from halftune.data.batch import Batch
from halftune.data.store import Example, Segment
from halftune.methods.grpo import ADVANTAGES, DROPPED, SERVED, Grpo, advantages, reward_metrics, spread
from halftune.model.tokenizer.added_tokens import visible_text
from halftune.train.batches.feed import Feed
from halftune.train.rewards import Rewards
from halftune.train.rollouts.sampling import Answer, Inputs, Sampler
from halftune.train.state import TrainState

log = get_logger(__name__)

_EQUAL = 8  # batches


@dataclass(frozen=True)
class Group:
    """The answers to one prompt.

    Attributes:
        index: of the prompt in the split.
        prompt: its tokens and media.
        answers: G answers.
        texts: their texts.
        asked: the prompt's text.
        found: fp64 ``[G, F]``, of each reward function; NaN: nothing to say.
        rewards: fp64 ``[G]``, their weighted sum, see ``Rewards.total``; NaN where all have nothing to say.
    """

    index: int
    prompt: Segment
    answers: Sequence[Answer]
    texts: Sequence[str]
    asked: str
    found: torch.Tensor
    rewards: torch.Tensor

    @property
    def equal(self) -> bool:
        """Whether all judged answers have the same reward, so that nothing is learned from them."""
        judged = self.rewards[~self.rewards.isnan()]
        return len(judged) < 2 or bool((judged == judged[0]).all())


class GrpoRollouts:
    """Makes batches of answers from batches of prompts.

    Attributes:
        shown: the latest answers to one prompt, with rewards, as ``rollouts.json`` holds them.

    Args:
        run: its model answers, its config names the rewards.

    Raises:
        ConfigError: a reward function cannot be loaded.
    """

    def __init__(self, run: TrainState) -> None:
        assert isinstance(run.config.method, GrpoMethod)
        assert isinstance(run.method, Grpo)
        self.run, self.section, self.method = run, run.config.method, run.method
        self.rewards, self.equal = Rewards(self.section), 0
        self.shown: dict[str, Any] | None = None
        self.sampler = Sampler(run, self.section) if self.section.server is None else self._on_server()

    def _on_server(self) -> Sampler:
        from halftune.train.rollouts.server import ServerSampler  # few runs have a server

        assert self.section.server is not None
        return ServerSampler(self.run, self.section, self.section.server)

    def __call__(self, batches: list[Batch], feed: Feed) -> list[Batch]:
        """See ``Rollouts``.

        Raises:
            TrainingError: a reward function fails.
        """
        return [self._answered(batch, feed) for batch in batches]

    def _answered(self, batch: Batch, feed: Feed) -> Batch:
        first = self._groups(batch.examples, batch.examples, 0, feed)
        groups = list(first)
        for attempt in range(0 if feed.evaluation else self.section.dynamic_sampling):
            # processes that share the weights sample together, with nothing to replace, too
            equal = [place for place, one in enumerate(groups) if one.equal]
            slots = [batch.examples[place] for place in equal]
            others = [self.sampler.seed(slot, -1 - attempt, feed) % len(feed.split) for slot in slots]
            for place, one in zip(equal, self._groups(others, slots, attempt + 1, feed), strict=True):
                groups[place] = one
        if not batch.examples:
            return batch
        if not feed.evaluation:
            each = zip(first[0].texts, first[0].rewards.tolist(), first[0].answers, strict=True)
            shown = [
                {"text": text, "reward": None if math.isnan(reward) else reward, "tokens": len(one.ids)}
                for text, reward, one in each
            ]
            self.shown = {"prompt": first[0].asked, "answers": shown}
        self._watch(first)
        return self._batch(batch, groups, self._measured(first, feed), feed)

    def _groups(self, examples: Sequence[int], slots: Sequence[int], attempt: int, feed: Feed) -> list[Group]:
        """Answers to prompts, with their rewards.

        Args:
            examples: the prompts' indices in the split.
            slots: for each prompt, the example of the batch that it stands for.
            attempt: how many prompts have stood there before.
            feed: that the batch is of.
        """
        number = self.section.num_generations
        prompts = [feed.split.example(index).segments[0] for index in examples]
        repeated = [one.input_ids for one in prompts for _ in range(number)]
        seeds = [self.sampler.seed(slot, attempt * number + one, feed) for slot in slots for one in range(number)]
        answers = self.sampler(repeated, seeds, self._inputs(prompts, examples, feed))
        if not prompts:
            return []
        # an answer's own row: a reward function may change what it is given
        rows = [feed.split.example(index).row or {} for index in examples for _ in range(number)]
        added = self.run.config.model.tokens.add
        texts = [visible_text(self.run.tokenizer, one.ids.tolist(), added) for one in answers]
        asked = [self.run.tokenizer.decode(one, skip_special_tokens=True) for one in repeated]
        found = self.rewards(asked, texts, [one.ids.tolist() for one in answers], rows, feed.split.where(examples))
        totals, made = self.rewards.total(found, number), []
        for place, index in enumerate(examples):
            own = slice(place * number, (place + 1) * number)
            words = asked[place * number]
            made.append(Group(index, prompts[place], answers[own], texts[own], words, found[:, own].T, totals[own]))
        return made

    def _inputs(self, prompts: Sequence[Segment], examples: Sequence[int], feed: Feed) -> Inputs | None:
        """What makes the inputs of the prompts' media, once for each answer; None in a run on text."""
        if feed.images is None:
            return None
        from halftune.data.media.inputs import prompt_inputs  # few runs have images

        media = [one.media for one in prompts for _ in range(self.section.num_generations)]
        return partial(prompt_inputs, feed.images, media, feed.split.where(examples))

    def _measured(self, groups: Sequence[Group], feed: Feed) -> dict[str, torch.Tensor]:
        """Columns of a batch for the metrics; an evaluation measures prompts with a judged answer only."""
        rewards = torch.stack([one.rewards for one in groups])
        answers = [one for group in groups for one in group.answers]
        lengths = torch.tensor([len(one.ids) for one in answers], dtype=torch.float32).view(rewards.shape)
        _, mean, deviation = spread(rewards)
        columns = {
            "reward": mean,
            "reward_std": deviation,
            "equal_rewards": torch.tensor([float(one.equal) for one in groups]),
            "completion_length": lengths.mean(dim=1),
            "truncated": torch.from_numpy(self.sampler.truncated(answers)).float().view(rewards.shape).mean(dim=1),
        }
        each = torch.stack([one.found for one in groups]).nanmean(dim=1)
        columns |= {name: each[:, i] for i, name in enumerate(reward_metrics(self.section))}
        if feed.evaluation:  # a batch without a judged answer is left out
            columns = {name: torch.where(mean.isnan(), torch.nan, one) for name, one in columns.items()}
        return columns

    def _batch(self, batch: Batch, groups: Sequence[Group], measured: dict[str, torch.Tensor], feed: Feed) -> Batch:
        section = self.section
        dropped = [bool(section.dynamic_sampling) and not feed.evaluation and one.equal for one in groups]
        examples, known = [], []
        for group, out in zip(groups, dropped, strict=True):
            segments, prompt = [], group.prompt.input_ids
            for answer, cut in zip(group.answers, self.sampler.truncated(group.answers), strict=True):
                labelled = np.arange(len(prompt) + len(answer.ids)) >= len(prompt)
                labelled &= not (out or (cut and section.mask_truncated))
                segments.append(Segment(np.concatenate([prompt, answer.ids]), labelled, group.prompt.media))
                if labelled.any() and answer.logprobs is not None:
                    known.append(torch.from_numpy(answer.logprobs))
            examples.append(Example(tuple(segments)))
        trained = [sum(int(one.loss_mask[1:].sum()) for one in group.segments) for group in examples]
        weights = [1.0 if feed.evaluation else self.method.group_weight(count) for count in trained]
        weights = [0.0 if out else weight for weight, out in zip(weights, dropped, strict=True)]
        rewards = torch.stack([one.rewards for one in groups])
        if feed.evaluation:  # a prompt without a judged answer is no part of the mean
            weights = [0.0 if bool(one.isnan().all()) else weight for one, weight in zip(rewards, weights, strict=True)]
        columns = {
            ADVANTAGES: advantages(rewards, scale=section.scale_rewards, leave_one_out=section.leave_one_out).flatten(),
            **measured,
        }
        if section.dynamic_sampling:
            columns[DROPPED] = torch.tensor(dropped, dtype=torch.float32)
        if section.server is not None:
            columns[SERVED] = torch.cat(known) if known else torch.zeros(0)
        columns = {name: one.float() for name, one in columns.items()}
        indices = [one.index for one in groups]
        made = feed.batch_of(examples, weights, columns, indices, packed=feed.batch.packing.value)
        return feed.with_media(made, indices, examples)

    def _watch(self, groups: Sequence[Group]) -> None:
        """Warn once if the first batches had no group with different rewards."""
        if self.equal < 0:
            return
        self.equal = self.equal + 1 if all(one.equal for one in groups) else -1
        if self.equal == _EQUAL:
            what = "in the first %d batches all answers to a prompt had the same reward: nothing is learned from them"
            log.warning(f"{what}; use rewards that tell answers apart, or more of num_generations", _EQUAL)
