"""Tokenised examples for training, and tokenised conversations with the positions of their turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

NO_LABEL = -100
"""Label of a token that carries no loss (the convention of torch's cross-entropy and Hugging Face)."""


@dataclass(frozen=True)
class Segment:
    """One token sequence.

    Attributes:
        input_ids: int32[T].
        loss_mask: bool[T], tokens with a label. The first token's label is ignored: nothing predicts it.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray

    @property
    def labels(self) -> np.ndarray:
        """int32[T], not shifted; ``NO_LABEL`` for tokens without a label."""
        return np.where(self.loss_mask, self.input_ids, np.int32(NO_LABEL))


@dataclass(frozen=True)
class Example:
    """The unit of shuffling, weighting, packing, hold-out and truncation; never split across forward passes.

    Attributes:
        segments: one for a conversation or document; two for a preference pair (chosen, rejected).
        columns: numbers that the method reads.
    """

    segments: tuple[Segment, ...]
    columns: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenTurn:
    """An assistant turn as token positions; ``locate.Turn`` has characters."""

    start: int
    end: int
    full_end: int
    complete: bool
    trained: bool


@dataclass(frozen=True)
class WholeSample:
    """A tokenised conversation before truncation.

    Attributes:
        ids: int32[T].
        starts, ends: int64[T], character offsets of each token.
        trained: bool[T], tokens with a label.
        turns: assistant turns.
        contents: token ranges of user and tool messages, which truncation may shorten.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    trained: np.ndarray
    turns: tuple[TokenTurn, ...]
    contents: tuple[tuple[int, int], ...]
