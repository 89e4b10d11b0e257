"""Attention that a model writes out itself, in what was recorded: values, times a softmax of a product of two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halftune.precision.trace.steps import Source, Step

PRODUCTS = frozenset({"matmul", "bmm", "einsum", "baddbmm"})
_FAR = 32  # calls between a product and what is looked for: scale, mask, cap, dropout, reshapes


@dataclass(frozen=True)
class Written:
    """An attention that was found.

    Attributes:
        operands: query, key and value, as they go into the two products.
        probabilities: what the values are multiplied with.
    """

    operands: Mapping[str, Source]
    probabilities: Source

    @property
    def contradict(self) -> bool:
        """Whether torch refuses one of the two products where autocast is off."""
        query, key, value = (source.dtype for source in self.operands.values())
        return query is not key or self.probabilities.dtype is not value


def written_attention(step: Step) -> Written | None:
    """The attention whose last product ``step`` is, or None.

    A product with a weight is no score: routers and pooled heads take a softmax too.
    """
    if step.op not in PRODUCTS or len(step.sources) < 2:
        return None
    left, right = step.sources[-2:]
    for probabilities, value in ((left, right), (right, left)):
        softmax = _before(probabilities, frozenset({"softmax"}))
        scores = _before(softmax.sources[0], PRODUCTS) if softmax is not None and softmax.sources else None
        if scores is not None and len(scores.sources) >= 2 and not any(map(_is_weight, scores.sources[-2:])):
            query, key = scores.sources[-2:]
            return Written({"query": query, "key": key, "value": value}, probabilities)
    return None


def _before(source: Source, sought: frozenset[str]) -> Step | None:
    """The nearest of the sought calls on the way to ``source``, with no product or layer in between."""
    waiting, seen = [source.step], set[int]()
    while waiting and len(seen) < _FAR:
        step = waiting.pop(0)
        if step is None or step.index in seen:
            continue
        if step.op in sought:
            return step
        seen.add(step.index)
        if step.op not in PRODUCTS and step.op != "linear":
            waiting += [each.step for each in step.sources]
    return None


def _is_weight(source: Source) -> bool:
    """Whether it is a parameter, as it is or reshaped and cast."""
    while source.step is not None and len(source.step.sources) == 1:
        source = source.step.sources[0]
    return source.leaf.startswith("parameter ")
