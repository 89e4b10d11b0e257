"""Fused experts, which transformers holds as 3-D parameters: LoRA on them, and their quantisation on load."""

from __future__ import annotations

from collections.abc import Iterable

from halftune.config.facts.architecture import Tensor, total_elements
from halftune.config.facts.model import ModelFacts
from halftune.config.sections.model import LoraAdapter
from halftune.core.errors import PlanError
from halftune.core.table import did_you_mean

Shapes = tuple[tuple[tuple[int, ...], bool, int], ...]


def expert_tensors(facts: ModelFacts) -> tuple[Tensor, ...]:
    """The weights ``[experts, …, …]`` of fused experts."""
    return tuple(one for one in facts.likely_tensors if is_expert(one.name, len(one.shape)))


def is_expert(name: str, dimensions: int) -> bool:
    """Whether a parameter is the weight of fused experts, by its name and number of dimensions."""
    return dimensions == 3 and "expert" in name.lower()


def targeted(facts: ModelFacts, adapter: LoraAdapter) -> tuple[tuple[Tensor, int], ...]:
    """The expert weights that ``adapter.target_parameters`` names, with the number of layers.

    Raises:
        PlanError: a name is the end of no expert weight.
    """
    tensors, asked = expert_tensors(facts), adapter.target_parameters
    names = [name for tensor in tensors for name in tensor.names()]
    if unknown := [one for one in asked if not _count(names, (one,))]:
        known = {".".join(name.rsplit(".", 2)[-2:]) for name in names}
        remedy = did_you_mean(unknown[0], known) if known else "remove it: the model has no fused experts"
        what = f"no weight of fused experts is named {unknown[0]!r}"
        raise PlanError(what, where="adapter.target_parameters", remedy=remedy, code="config.bad_target_modules")
    return tuple((one, count) for one in tensors if (count := _count(one.names(), asked)))


def _count(names: Iterable[str], ends: Iterable[str]) -> int:
    """How many names have one of the ends."""
    return sum(any(f".{name}".endswith(f".{end}") for end in ends) for name in names)


def updates(facts: ModelFacts, adapter: LoraAdapter) -> tuple[Shapes, int, int, str]:
    """What LoRA on experts trains, for E experts: A is ``[E·rank, in]``, B ``[out, E·rank]``.

    Returns:
        shapes of A and B with how many there are; elements of the adapted weights; those of them that are no operands
        of ``grouped_mm``, whose W + B·A peft computes; what the plan says about them.

    Raises:
        PlanError: a name is the end of no expert weight, or peft would have to add B·A to a quantised one.
    """
    chosen = targeted(facts, adapter)
    shapes = tuple(
        (shape, True, count)
        for tensor, count in chosen
        for shape in _low_rank(tensor.shape, adapter.rank)
    )  # fmt: skip
    kinds = sorted({tensor.name.rpartition(".")[2] for tensor, _ in chosen})
    number = sum(count for _, count in chosen)
    summed = sum(tensor.size * count for tensor, count in chosen if tensor.kind != "experts")
    if summed and facts.quantized_experts:
        what, remedy = "peft cannot add B·A to quantised experts", "set model.quantize_experts: false"
        raise PlanError(what, where="adapter.target_parameters", remedy=remedy, code="config.keys_conflict")
    said = f"{number} weights of fused experts ({', '.join(kinds)}), B·A multiplied beside W"
    if summed:
        said = f"{number} weights of fused experts ({', '.join(kinds)}), W + B·A computed in each pass"
    return shapes, sum(tensor.size * count for tensor, count in chosen), summed, said


def check_quantised(facts: ModelFacts) -> int:
    """Number of weights of fused experts, which are quantised on load.

    Raises:
        PlanError: the model has none.
    """
    size = total_elements(expert_tensors(facts))
    if facts.tensors and not size:
        what, remedy = f"{facts.model_type} has no fused experts", "remove it"
        raise PlanError(what, where="model.quantize_experts", remedy=remedy, code="plan.quantization_unavailable")
    return size


def _low_rank(shape: tuple[int, ...], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    experts, rows, columns = shape
    return (experts * rank, columns), (rows, experts * rank)
