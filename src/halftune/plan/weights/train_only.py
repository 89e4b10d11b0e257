"""Full fine-tuning of some parameters: which ones, and how many weights they have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from halftune.config.facts.architecture import Tensor
from halftune.config.facts.model import ModelFacts
from halftune.config.sections.model import NoAdapter
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.core.table import did_you_mean
from halftune.plan.weights.targets import HEAD, is_hidden, is_table

_LAYER = r"^(?:[^.]*[^.\d][^.]*\.)*(?:{})\."  # the first number in a parameter's name is its layer


def trained_patterns(adapter: NoAdapter, facts: ModelFacts) -> tuple[str, ...]:
    """The regular expressions of ``train_only``, and one for the layers of ``train_layers``.

    Raises:
        PlanError: the model has fewer layers.
    """
    count = adapter.train_layers
    if count is None:
        return adapter.train_only
    layers = range(facts.num_layers)
    if not 1 <= abs(count) <= len(layers):
        what = f"expected 1 to {len(layers)} layers, or -{len(layers)} to -1, got {count}"
        remedy = "lower it, or remove it to train every layer"
        raise PlanError(what, where="adapter.train_layers", remedy=remedy, code="config.out_of_range")
    chosen = layers[-count:] if count > 0 else layers[:-count]
    if adapter.spread_layers:
        if count < 0 or len(layers) % count:
            what = f"spread_layers requires a number of layers that divides {len(layers)}, got {count}"
            remedy = "set adapter.train_layers to the number of added layers"
            raise PlanError(what, where="adapter.train_layers", remedy=remedy, code="config.out_of_range")
        chosen = layers[len(layers) // count - 1 :: len(layers) // count]
    return (*adapter.train_only, _LAYER.format("|".join(map(str, chosen))))


def count_trained(
    facts: ModelFacts, adapter: NoAdapter
) -> tuple[Choice[int], tuple[tuple[tuple[int, ...], bool, int], ...]]:
    """The number of trained weights, and their (shape, whether it is a hidden matrix, how many).

    Raises:
        PlanError: a pattern matches no parameter, or the model has fewer layers than asked for.
    """
    patterns = trained_patterns(adapter, facts)
    named = list(_names(facts))
    if facts.tensors:
        _check_patterns(patterns, [name for _, names in named for name in names])
    matched = [tensor for tensor, names in named if any(_match(one, names) for one in patterns)]
    shapes = tuple((one.shape, is_hidden(one), matched.count(one)) for one in dict.fromkeys(matched))
    reason = f"only the parameters that match {', '.join(patterns)}; the rest is frozen"
    if not facts.tensors:
        reason += "; estimated from the sizes of a Llama"
    return Choice(sum(tensor.size for tensor in matched), reason), shapes


def _match(pattern: str, names: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for name in names)


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not _match(pattern, names):
            what = f"no parameter matches {pattern!r}"
            remedy = did_you_mean(pattern, {name.split(".")[-2] for name in names if "." in name})
            raise PlanError(what, where="adapter.train_only", remedy=remedy, code="config.bad_target_modules")


def _names(facts: ModelFacts) -> Iterator[tuple[Tensor, tuple[str, ...]]]:
    """Every tensor of the model with its names; a tied head is another name of the embedding."""
    for tensor in facts.likely_tensors:
        tied = facts.tie_word_embeddings and is_table(tensor, facts.vocab_size)
        for name in tensor.names():
            yield tensor, (name, f"{HEAD}.weight") if tied else (name,)
