"""Finds attention written in a model's own code, in recorded calls: values times a softmax of a product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from halftune.precision.record.steps import Source, Step

_PRODUCTS = frozenset({"matmul", "bmm", "einsum", "baddbmm"})
_SOFTMAX = frozenset({"softmax", "exp"})  # exp for softmax written out
_FAR = 32  # maximum calls between a product and the softmax: scale, mask, soft-capping, dropout, reshapes


@dataclass(frozen=True)
class ManualAttention:
    """Attention found in recorded calls.

    Attributes:
        operands: query, key and value, as they go into the two products.
        probabilities: what the values are multiplied with.
        by_elements: whether a product is one of elements, summed: type promotion rules there, and autocast has no say.
    """

    operands: Mapping[str, Source]
    probabilities: Source
    by_elements: bool = False

    @property
    def contradict(self) -> bool:
        """Whether torch would refuse one of the two products without autocast."""
        query, key, value = (source.dtype for source in self.operands.values())
        return not self.by_elements and (query is not key or self.probabilities.dtype is not value)


def find_manual_attention(step: Step) -> ManualAttention | None:
    """Return the attention whose last product is ``step``, or None.

    A product with a weight, or with what comes from buffers alone, is no score: routers, pooled heads and random
    features take a softmax or an exponential too.
    """
    factors = _factors(step)
    if len(factors) < 2:
        return None
    for probabilities in factors:
        softmax = _before(probabilities, lambda before: before.op in _SOFTMAX)
        scores = _before(softmax.sources[0], _is_product) if softmax is not None and softmax.sources else None
        data = [each for each in _factors(scores) if not _is_weight(each)] if scores is not None else []
        if scores is not None and len(data) >= 2:
            values = [each for each in factors if each is not probabilities]
            value = next((each for each in reversed(values) if not _is_weight(each)), values[-1])
            by_elements = "sum" in (step.op, scores.op)
            return ManualAttention({"query": data[0], "key": data[1], "value": value}, probabilities, by_elements)
    return None


def _factors(step: Step | None) -> tuple[Source, ...]:
    """The factors of a product: the last two of ``baddbmm``, those of the multiplication in ``(a * b).sum()``."""
    if step is None:
        return ()
    if step.op in _PRODUCTS:
        return step.sources if step.op == "einsum" else step.sources[-2:]
    made = step.sources[0].step if step.op == "sum" and step.sources else None
    return made.sources if made is not None and made.op == "mul" and len(made.sources) == 2 else ()


def _is_product(step: Step) -> bool:
    return len(_factors(step)) >= 2


def _before(source: Source, sought: Callable[[Step], bool]) -> Step | None:
    """The nearest call in ``wanted`` before ``source``, with no product or layer in between."""
    waiting, seen = [source.step], set[int]()
    while waiting and len(seen) < _FAR:
        step = waiting.pop(0)
        if step is None or step.index in seen:
            continue
        if sought(step):
            return step
        seen.add(step.index)
        if not _is_product(step) and step.op != "linear":
            waiting += [each.step for each in step.sources]
    return None


def _is_weight(source: Source) -> bool:
    """Whether an operand is a (reshaped or cast) parameter, or depends on no data."""
    while source.step is not None and len(source.step.sources) == 1:
        source = source.step.sources[0]
    return source.constant or source.leaf.startswith("parameter ")
