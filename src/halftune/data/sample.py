"""A tokenised sample, whole (with where its turns are) and as training sees it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NO_LABEL = -100
"""Label of a token that carries no loss (the convention of torch's cross-entropy and Hugging Face)."""


@dataclass(frozen=True)
class Sample:
    """What training is fed, T tokens.

    Attributes:
        input_ids: int32[T].
        labels: int32[T], not shifted; ``NO_LABEL`` where a token is not trained. The first token is predicted from
            nothing and never carries one.
    """

    input_ids: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class TokenTurn:
    """An assistant's turn in tokens; as ``mask.Turn``, in characters, is."""

    start: int
    end: int
    full_end: int
    complete: bool
    trained: bool


@dataclass(frozen=True)
class WholeSample:
    """A tokenised conversation before it is made to fit.

    Attributes:
        ids: int32[T].
        starts, ends: int64[T], characters of each token.
        trained: bool[T], which tokens carry a label.
        turns: the assistant's turns.
        contents: token ranges of the texts of user and tool messages, which may be shortened.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    trained: np.ndarray
    turns: tuple[TokenTurn, ...]
    contents: tuple[tuple[int, int], ...]
