"""Constraints: what parts of a run demand of its config and its model, before anything is decided.

Each row takes a request and returns another one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

from halftune.plan.request import Request
from halftune.plan.weights.added_tokens import with_added_tokens
from halftune.plan.weights.images import with_media
from halftune.plan.weights.parts import with_parts
from halftune.plan.weights.score_head import with_score_head


class Constraint(NamedTuple):
    """A row of ``CONSTRAINTS``.

    Attributes:
        name: what demands it.
        applies: whether this run has it.
        apply: the request as it must be; raises ``PlanError`` where that is not possible.
    """

    name: str
    applies: Callable[[Request], bool]
    apply: Callable[[Request], Request]


CONSTRAINTS = (
    # before the parts: a tower's dtype and rate depend on whether images reach it
    Constraint("images and audio", lambda asked: bool(asked.config.data.media), with_media),
    Constraint("parts", lambda asked: True, with_parts),
    # after the parts: `train_only` of a frozen language model must also name the new rows
    Constraint("added tokens", lambda asked: bool(asked.config.model.tokens.add), with_added_tokens),
    # last: it replaces the output layer, which added tokens would have grown
    Constraint("score head", lambda asked: asked.config.method.head == "score" or asked.facts.scores, with_score_head),
)


def constrained(request: Request) -> Request:
    """Apply every row of ``CONSTRAINTS`` that this run has, in order.

    Raises:
        PlanError: a constraint cannot be met.
    """
    return reduce(lambda asked, row: row.apply(asked) if row.applies(asked) else asked, CONSTRAINTS, request)
