"""Answers of the model in training to the prompts of a batch, with their rewards and advantages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from halftune.config.sections.method import GrpoMethod
from halftune.core import heartbeat
from halftune.core.log import get_logger
from halftune.data.batch import LABEL_POSITIONS, WEIGHT, Batch, collate
from halftune.data.store import NO_LABEL, Example, Segment
from halftune.methods.grpo import ADVANTAGES, Grpo, advantages
from halftune.model.generate import decoding, ending_ids
from halftune.precision.dtypes import autocast
from halftune.train.feed import Feed
from halftune.train.rewards import Rewards
from halftune.train.state import TrainState

log = get_logger(__name__)

_EQUAL = 8  # batches


class Sampling(LogitsProcessor):
    """Adds Gumbel noise to log-probabilities, so that the highest is a sample; every row has noise of its own.

    Args:
        section: temperature, ``top_p`` and ``top_k``.
        seeds: one for each row.
        device: of the logits.
    """

    def __init__(self, section: GrpoMethod, seeds: Sequence[int], device: torch.device) -> None:
        self._warpers = LogitsProcessorList([TemperatureLogitsWarper(float(section.temperature))])
        if section.top_k:
            self._warpers.append(TopKLogitsWarper(section.top_k))
        if section.top_p < 1:
            self._warpers.append(TopPLogitsWarper(float(section.top_p)))
        self._random = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Any, scores: Any) -> torch.Tensor:
        """Scores ``[N, V]`` with noise."""
        heartbeat.beat()  # a long answer is no hang
        noise = torch.stack([torch.rand(scores.shape[1], generator=one, device=scores.device) for one in self._random])
        return self._warpers(input_ids, scores.float()) - torch.log(-torch.log(noise.clamp(1e-20, 1 - 1e-7)))


class Rollouts:
    """Makes batches of answers from batches of prompts.

    The random numbers of an answer depend on the seed, the step, the prompt and the answer's number only: a resumed run
    samples the same.

    Args:
        run: its model answers, its config names the rewards.

    Raises:
        ConfigError: a reward function cannot be loaded.
    """

    def __init__(self, run: TrainState) -> None:
        assert isinstance(run.config.method, GrpoMethod)
        assert isinstance(run.method, Grpo)
        self.run, self.section, self.method = run, run.config.method, run.method
        self.rewards, self.equal, self.iterations = Rewards(self.section.rewards), 0, self.section.num_iterations
        self.causal: Any = run.model.get_base_model() if isinstance(run.model, PeftModel) else run.model
        self.ends = set(ending_ids(run.tokenizer, self.causal.generation_config))

    def __call__(self, batches: list[Batch], feed: Feed) -> list[Batch]:
        """Batches of answers; those that only fill up a step stay as they are.

        Args:
            batches: of prompts.
            feed: that they are of.

        Raises:
            TrainingError: a reward function fails.
        """
        return [self._answered(batch, feed) if batch.examples else batch for batch in batches]

    def _answered(self, batch: Batch, feed: Feed) -> Batch:
        number = self.section.num_generations
        prompts = [feed.split.example(index).segments[0] for index in batch.examples]
        repeated = [one for one in prompts for _ in range(number)]
        seeds = [self._seed(index, answer, feed) for index in batch.examples for answer in range(number)]
        answers = self._generate([one.input_ids for one in repeated], seeds)
        rows = [json.loads(one.media) for one in prompts for _ in range(number)]
        texts = [self.run.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
        asked = [self.run.tokenizer.decode(one.input_ids, skip_special_tokens=True) for one in repeated]
        found = self.rewards(asked, texts, rows, feed.split.where(batch.examples))
        truncated = np.array([ids[-1] not in self.ends for ids in answers])
        return self._batch(batch, [one.input_ids for one in repeated], answers, truncated, found, feed)

    def _batch(
        self,
        batch: Batch,
        prompts: list[np.ndarray],
        answers: list[np.ndarray],
        truncated: np.ndarray,
        found: torch.Tensor,
        feed: Feed,
    ) -> Batch:
        section, number = self.section, self.section.num_generations
        segments = []
        for prompt, answer, cut in zip(prompts, answers, truncated, strict=True):
            labelled = np.arange(len(prompt) + len(answer)) >= len(prompt)
            labelled &= not (cut and section.mask_truncated)
            segments.append(Segment(np.concatenate([prompt, answer]), labelled))
        groups = [tuple(segments[start : start + number]) for start in range(0, len(segments), number)]
        made = collate([Example(group) for group in groups], feed.pad_token_id, packed=feed.batch.packing.value)
        rewards = (found * self.rewards.weights[:, None]).nansum(dim=0).view(-1, number)
        self._watch(rewards)
        lengths = torch.tensor([len(one) for one in answers], dtype=torch.float32).view(-1, number)
        trained = [sum(int(one.loss_mask[1:].sum()) for one in group) for group in groups]
        weights = [1.0 if feed.evaluation else self.method.group_weight(count) for count in trained]
        columns = {
            WEIGHT: torch.tensor(weights),
            ADVANTAGES: advantages(rewards, scale=section.scale_rewards, leave_one_out=section.leave_one_out).flatten(),
            "reward": rewards.mean(dim=1),
            "reward_std": rewards.std(dim=1),
            "completion_length": lengths.mean(dim=1),
            "truncated": torch.from_numpy(truncated).float().view(-1, number).mean(dim=1),
        }
        if len(section.rewards) > 1:
            each = found.view(len(found), -1, number).nanmean(dim=2).nan_to_num()
            columns |= {f"reward_{one.function}": each[i] for i, one in enumerate(section.rewards)}
        predicted = made.tokens["labels"][:, 1:] != NO_LABEL
        return replace(
            made,
            extras={**made.extras, LABEL_POSITIONS: predicted.any(dim=0).nonzero().squeeze(1)},
            columns=columns,
            weight=sum(weights),
            fed=made.tokens["labels"].numel(),
            real=sum(len(one.input_ids) for one in segments),
            trained=sum(trained),
            examples=batch.examples,
        )

    def _watch(self, rewards: torch.Tensor) -> None:
        """Warn once if the first batches had no group with different rewards ``[E, G]``."""
        if self.equal < 0:
            return
        self.equal = self.equal + 1 if bool((rewards == rewards[:, :1]).all()) else -1
        if self.equal == _EQUAL:
            what = "in the first %d batches all answers to a prompt had the same reward: nothing is learned from them"
            log.warning(f"{what}; use rewards that tell answers apart, or more of num_generations", _EQUAL)

    def _generate(self, prompts: list[np.ndarray], seeds: list[int]) -> list[np.ndarray]:
        """The answers' ids with the token that ends them, one of each prompt."""
        run, longest = self.run, max(map(len, prompts))
        ids = torch.full((len(prompts), longest), run.feed.pad_token_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left: answers begin in the same column
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, longest - len(prompt) :] = 1
        settings = GenerationConfig(
            max_new_tokens=self.section.max_completion_length,
            do_sample=False,
            eos_token_id=sorted(self.ends),
            pad_token_id=run.feed.pad_token_id,
            use_cache=True,
        )
        sampling = LogitsProcessorList([Sampling(self.section, seeds, run.device)])
        with decoding(self.causal, settings), torch.no_grad(), autocast(run.plan.precision, run.device):
            made = self.causal.generate(
                ids.to(run.device),
                attention_mask=mask.to(run.device),
                generation_config=settings,
                logits_processor=sampling,
            )
        return [self._cut(row) for row in made[:, longest:].cpu().numpy()]

    def _cut(self, answer: np.ndarray) -> np.ndarray:
        ends = np.flatnonzero(np.isin(answer, list(self.ends)))
        return answer[: ends[0] + 1 if len(ends) else len(answer)].astype(np.int32)

    def _seed(self, index: int, answer: int, feed: Feed) -> int:
        parts = (self.run.config.training.seed, self.run.step, int(feed.evaluation), index, answer)
        return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")
