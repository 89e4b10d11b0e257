"""Samples answers from the model in training; the random numbers of an answer are its own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from peft import PeftModel
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from halftune.core.processes import heartbeat
from halftune.model.generate import ending_ids, generate_answers
from halftune.precision.dtypes import autocast
from halftune.train.batches.feed import Feed
from halftune.train.state import TrainState

Inputs = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
_PLACEHOLDER = re.compile(r"^(image|video|audio)_token_(id|index)$")


class SamplingSettings(Protocol):
    """Keys of a method's section."""

    @property
    def max_completion_length(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt.

    Attributes:
        ids: int32 ``[T]``, with the token that ends it.
        logprobs: fp32 ``[T]``, the tokens' log-probabilities where they were sampled; None: not known.
    """

    ids: np.ndarray
    logprobs: np.ndarray | None = None


class Sampling(LogitsProcessor):
    """Adds Gumbel noise to log-probabilities, so that the highest is a sample; every row has noise of its own.

    Args:
        section: temperature, ``top_p`` and ``top_k``.
        seeds: one for each row.
        device: of the logits.
        never: tokens that are not sampled.
    """

    def __init__(
        self, section: SamplingSettings, seeds: Sequence[int], device: torch.device, never: Sequence[int] = ()
    ) -> None:
        self._warpers = LogitsProcessorList([TemperatureLogitsWarper(float(section.temperature))])
        if section.top_k:
            self._warpers.append(TopKLogitsWarper(section.top_k))
        if section.top_p < 1:
            self._warpers.append(TopPLogitsWarper(float(section.top_p)))
        self._never = list(never)
        self._random = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Any, scores: Any) -> torch.Tensor:
        """Scores ``[N, V]`` with noise."""
        heartbeat.beat()  # a long answer is no hang
        noise = torch.stack([torch.rand(scores.shape[1], generator=one, device=scores.device) for one in self._random])
        scores = scores.float().index_fill(1, torch.tensor(self._never, device=scores.device).long(), -torch.inf)
        return self._warpers(input_ids, scores) - torch.log(-torch.log(noise.clamp(1e-20, 1 - 1e-7)))


class Sampler:
    """Samples from the model itself.

    The random numbers of an answer depend on the seed, the step, the example and the answer's number only: a resumed
    run samples the same.

    Args:
        run: its model answers.
        section: how it samples.
    """

    def __init__(self, run: TrainState, section: SamplingSettings) -> None:
        self.run, self.section = run, section
        self.causal: Any = run.model.get_base_model() if isinstance(run.model, PeftModel) else run.model
        self.ends = ending_ids(run.tokenizer, self.causal.generation_config)

    def __call__(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], inputs: Inputs | None = None
    ) -> list[Answer]:
        """One answer to each prompt; no prompts: keep other processes of a sharded model company.

        Args:
            prompts: token ids, int32.
            seeds: one for each prompt.
            inputs: as of ``generate_answers``.
        """
        if not prompts:
            if self.run.sharded:
                self._generate([np.array([self.run.feed.pad_token_id], np.int32)], [0], 1)
            return []
        return self._generate(prompts, seeds, self.section.max_completion_length, inputs)

    def truncated(self, answers: Sequence[Answer]) -> np.ndarray:
        """Whether each answer ends without an ending token: bool ``[N]``."""
        return np.array([one.ids[-1] not in self.ends for one in answers])

    def seed(self, index: int, answer: int, feed: Feed) -> int:
        """The seed of an answer to the example at an index."""
        parts = (self.run.config.training.seed, self.run.step, int(feed.evaluation), index, answer)
        return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")

    def _generate(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], most: int, inputs: Inputs | None = None
    ) -> list[Answer]:
        # an image in an answer has no pixels
        named = vars(self.causal.config).items() if inputs is not None else ()
        never = sorted({value for name, value in named if _PLACEHOLDER.search(name) and isinstance(value, int)})
        run, sampling = self.run, [Sampling(self.section, seeds, self.run.device, never)]
        with run.strategy.generating(run.model), autocast(run.plan.precision, run.device):
            made = generate_answers(
                self.causal,
                prompts,
                ends=self.ends,
                most=most,
                pad=run.feed.pad_token_id,
                device=run.device,
                processors=sampling,
                synced=run.sharded,
                inputs=inputs,
            )
        return [Answer(one) for one in made]
