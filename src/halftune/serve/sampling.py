"""Requests in generation, and the choice of their next tokens; each has its own settings and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from halftune.config.sections.training import GenerationSection
from halftune.core.log import get_logger

log = get_logger(__name__)
FAILED = "the forward pass failed; the server's log says why"
_LEAST = -9999.0  # OpenAI's value for a token that cannot come: JSON has no infinity


class Token(NamedTuple):
    """A token of an answer.

    Attributes:
        id: its number in the vocabulary.
        logprob: its log-probability before temperature and cuts; None if not asked for.
        top: the likeliest tokens with theirs, the likeliest first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class End(NamedTuple):
    """The end of a generation; ``error`` says what went wrong, empty if nothing did."""

    error: str = ""


@dataclass(eq=False)
class Job:
    """A request in generation.

    Attributes:
        ids: tokens of the prompt.
        max_tokens: tokens of the answer at most, ≥ 1.
        ends: tokens that end the answer.
        settings: how it is decoded; ``max_new_tokens`` is not used.
        emit: takes every token, then the end; called in the engine's thread.
        top: how many of the likeliest tokens are wanted with each token; None: no log-probabilities.
        seed: of the random numbers; None: the process's.
        inputs: further inputs of the model for the prompt (images).
        made: the answer's tokens so far.
        cancelled: nobody waits for the answer any more.
    """

    ids: list[int]
    max_tokens: int
    ends: frozenset[int]
    settings: GenerationSection
    emit: Callable[[Token | End], None]
    top: int | None = None
    seed: int | None = None
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    made: list[int] = field(default_factory=list)
    cancelled: bool = False
    _random: torch.Generator | None = None

    def __post_init__(self) -> None:
        chosen, self.warpers = self.settings, LogitsProcessorList()
        if chosen.repetition_penalty != 1:
            self.warpers.append(RepetitionPenaltyLogitsProcessor(float(chosen.repetition_penalty)))
        if chosen.temperature > 0:  # in the order of `generate`
            self.warpers.append(TemperatureLogitsWarper(float(chosen.temperature)))
            if chosen.top_k:
                self.warpers.append(TopKLogitsWarper(chosen.top_k))
            if chosen.top_p < 1:
                self.warpers.append(TopPLogitsWarper(float(chosen.top_p)))

    def __deepcopy__(self, _: Any) -> Job:
        """Continuous batching copies what belongs to a request that it starts again."""
        return self

    def fail(self, why: str) -> None:
        """End with an error."""
        self.cancelled = True
        self.emit(End(why))

    def pick(self, scores: torch.Tensor) -> int:
        """The next token, by logits fp32 ``[V]``.

        Raises:
            ValueError: the settings make logits of it that are not finite.
        """
        so_far = torch.tensor([self.ids + self.made], device=scores.device) if self.warpers else None
        found: torch.Tensor = self.warpers(so_far, scores[None])  # pyright: ignore[reportArgumentType]
        if not found.max().isfinite():  # multinomial would end a GPU's process
            raise ValueError("the decoding settings make logits that are not finite")
        if not self.settings.temperature:
            return int(found.argmax())
        if self._random is None and self.seed is not None:
            self._random = torch.Generator(scores.device).manual_seed(self.seed)
        return int(torch.multinomial(found.softmax(-1), 1, generator=self._random))


def choose(jobs: Sequence[Job], scores: torch.Tensor) -> torch.Tensor:
    """Choose and emit the next token of each job; a job whose choice fails ends with an error.

    Args:
        jobs: N requests.
        scores: logits ``[N, V]``.

    Returns:
        The tokens, int64 ``[N]``.
    """
    scores = scores.float()
    finite = (scores < float("inf")).all(-1).tolist()  # false for NaN, too
    likeliest = scores.argmax(-1).tolist()
    for row, job in enumerate(jobs):
        if job.cancelled:
            continue
        if not finite[row]:
            job.fail("the model's logits are not finite")
            continue
        try:
            token = job.pick(scores[row]) if job.warpers or job.settings.temperature else likeliest[row]
        except Exception:  # of one request; its neighbours go on
            log.exception("a request failed")
            job.fail("the choice of a token failed; the server's log says why")
            continue
        job.made.append(token)
        job.emit(with_logprobs([token], scores[row : row + 1], job.top)[0])
        likeliest[row] = token
    return torch.tensor(likeliest, device=scores.device)


def with_logprobs(tokens: Sequence[int], scores: torch.Tensor, top: int | None) -> list[Token]:
    """Tokens with their log-probabilities.

    Args:
        tokens: T tokens.
        scores: the logits that predict them, fp32 ``[T, V]``.
        top: how many of the likeliest are added to each; None: no log-probabilities.
    """
    if top is None:
        return [Token(token) for token in tokens]
    logprobs = scores.log_softmax(-1).clamp(min=_LEAST)
    own = logprobs.gather(1, torch.tensor([tokens], device=scores.device).T)[:, 0].tolist()
    best = logprobs.topk(min(top, logprobs.shape[1]))
    likeliest = [
        tuple(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return [Token(*row) for row in zip(tokens, own, likeliest, strict=True)]
