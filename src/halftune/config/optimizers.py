"""The optimizers, one row each, with everything that plans need; ``halftune.optim`` builds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, ...]
Optim = Literal["adamw", "adam", "sgd", "adafactor", "adagrad", "muon"]
"""The keys of :data:`OPTIMIZERS`, for the type of ``training.optim``."""

ADAM_OPTIONS = ("adam_beta1", "adam_beta2", "adam_epsilon")


@dataclass(frozen=True)
class OptimizerSpec:
    """Requirements and state size of an optimizer.

    Attributes:
        state: (shape of a weight, whether it is a hidden matrix) → number of elements of its optimizer state, without
            scalars such as step counts. A hidden matrix has two dimensions and is neither an embedding nor the output
            layer.
        options: keys of the ``training`` section that not all optimizers read, but this one does.
        rest: the algorithm for weights that are not hidden matrices, if different; else empty.
        needs_whole_matrix: whether updates need whole rows and columns, which no process has under fsdp2.
        own_state_dtype: whether the state can have another dtype than the weights (``precision.optimizer_state``).
        since_torch: first torch release with it, as (major, minor).
    """

    state: Callable[[Shape, bool], int]
    options: tuple[str, ...] = ()
    rest: str = ""
    needs_whole_matrix: bool = False
    own_state_dtype: bool = False
    since_torch: tuple[int, int] = (2, 6)


def _per_weight(count: int) -> Callable[[Shape, bool], int]:
    return lambda shape, _: count * math.prod(shape)


def _factored(shape: Shape, _: bool) -> int:
    """Adafactor (arXiv:1804.04235): a row and a column per matrix, vectors in full."""
    return math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1] if len(shape) > 1 else math.prod(shape)


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(_per_weight(2), options=ADAM_OPTIONS, own_state_dtype=True),
    "adam": OptimizerSpec(_per_weight(2), options=ADAM_OPTIONS),
    "sgd": OptimizerSpec(_per_weight(0)),
    "adafactor": OptimizerSpec(_factored, needs_whole_matrix=True),
    "adagrad": OptimizerSpec(_per_weight(1)),
    "muon": OptimizerSpec(
        lambda shape, hidden: (1 if hidden else 2) * math.prod(shape),
        options=(*ADAM_OPTIONS, "muon_momentum", "muon_ns_steps"),
        rest="adamw",
        needs_whole_matrix=True,
        since_torch=(2, 9),
    ),
}
