"""Trained parts of a multimodal model besides the language model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from halftune.config.facts.media import part_of
from halftune.config.sections.training import TrainingSection
from halftune.model.load.towers import Towers, set_towers, towers_of
from halftune.plan import Plan
from halftune.plan.weights.parts import part_rates
from halftune.precision.dtypes import plain_name


def left_out(model: PreTrainedModel, plan: Plan) -> str | None:
    """A regular expression for the full names of modules that LoRA does not adapt; None: no towers."""
    if (towers := towers_of(model)) is None:
        return None
    adapted = [part for part in ("vision", "audio", "projector") if plan.mode(part) == "lora"]
    if not adapted:
        return towers.pattern
    inside = sorted(_roots(model, towers, adapted))
    everything = len(adapted) == len({part_of(name) for name, _ in model.named_parameters() if towers.own(name)})
    if everything and plan.mode("language") != "frozen":
        return None
    named = "|".join(map(re.escape, inside))
    if plan.mode("language") == "frozen":
        return rf"(?!({named})(\.|$)).*"
    return rf"(?=({'|'.join(map(re.escape, towers.names))})(\.|$))(?!({named})(\.|$)).*"


def _roots(model: nn.Module, towers: Towers, parts: list[str]) -> Iterator[str]:
    """The largest modules of towers whose weights all belong to these parts."""
    waiting = list(towers.names)
    while waiting:
        name = waiting.pop()
        path, _, leaf = name.rpartition(".")
        if leaf in model.get_submodule(path)._parameters:
            continue
        module = model.get_submodule(name)
        found = {part_of(f"{name}.{one}") for one, _ in module.named_parameters()}
        if found and found.issubset(parts):
            yield name
        elif found.intersection(parts):
            waiting += [f"{name}.{one}" for one, _ in module.named_children()]


def saved_parts(model: PreTrainedModel, plan: Plan) -> list[str]:
    """Full names of the modules of parts that are trained in full and saved with an adapter."""
    parts = [part for part in ("vision", "audio", "projector") if plan.mode(part) == "full"]
    if not parts or (towers := towers_of(model)) is None:
        return []
    names: list[str] = []
    for name in _roots(model, towers, parts):
        module = model.get_submodule(name)
        lists = isinstance(module, nn.ModuleList)  # which peft does not wrap
        names += [f"{name}.{one}" for one, _ in module.named_children()] if lists else [name]
    return sorted(names)


def release(model: nn.Module, trained: Callable[[str], bool]) -> None:
    """Make trained weights of towers the model's own: they are saved from memory, not copied from the base model.

    Args:
        model: as ``load_model`` returns it.
        trained: whether the parameter of this name is trained.
    """
    if (towers := towers_of(model)) is None:
        return
    released = {name for name, _ in model.named_parameters() if towers.own(name) and trained(name)}
    if not released:
        return
    names = tuple(chain.from_iterable(_frozen_below(model, root, released) for root in towers.names))
    kept = {source for name, found in towers.sources.items() if name not in released for source in found}
    again = {source for name in released for source in towers.sources.get(name, ())} - kept
    tensors = tuple(name for name in towers.tensors if name not in again)
    set_towers(model, replace(towers, names=names, tensors=tensors))


def _frozen_below(model: nn.Module, name: str, released: Collection[str]) -> Iterator[str]:
    """The largest modules and parameters below a name that have no released parameter."""
    path, _, leaf = name.rpartition(".")
    if leaf in model.get_submodule(path)._parameters:
        yield from () if name in released else (name,)
        return
    if not any(one.startswith(f"{name}.") for one in released):
        yield name
        return
    module = model.get_submodule(name)
    inner = [one for one, child in module.named_children() if next(child.parameters(), None) is not None]
    for one in (*inner, *(one for one, weight in module._parameters.items() if weight is not None)):
        yield from _frozen_below(model, f"{name}.{one}", released)


def adapted_towers(adapted: PeftModel) -> tuple[str, ...]:
    """How the names of weights begin that an adapter changes in towers; a merged export does not copy them."""
    base: Any = adapted.get_base_model()
    if (towers := towers_of(base)) is None:
        return ()
    return tuple(
        plain_name(f"{name}.")
        for name, module in base.named_modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and towers.contain(name)
    )


class _InGraph:
    """Adds zero times the trained weights of towers to the input embeddings.

    Rows without images do not call the vision tower, and some towers have layers that no output depends on. Their
    weights still have a gradient, so that all processes reduce the same ones, and a step does not depend on how its
    rows are spread.
    """

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights

    def __call__(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return output
        nothing = torch.stack([one.flatten()[:1].float().sum() for one in self.weights]).sum() * 0
        return output + nothing.to(output)


def keep_in_graph(model: nn.Module, plan: Plan) -> None:
    """Give every trained weight of a tower a gradient in each backward pass; fsdp2 does so itself."""
    if plan.distribution.value != "fsdp2" and (trained := trained_in_towers(model)):
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        base.get_input_embeddings().register_forward_hook(_InGraph(trained))


def trained_in_towers(model: nn.Module) -> list[nn.Parameter]:
    """The trained weights of towers."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if (towers := towers_of(base)) is None:
        return []
    return [one for name, one in base.named_parameters() if one.requires_grad and towers.contain(plain_name(name))]


def set_part_rates(optimizer: Optimizer, model: nn.Module, training: TrainingSection) -> None:
    """Move the trained weights of towers into groups with the learning rates of their parts.

    Args:
        optimizer: of all trained weights.
        model: the model, with its adapter.
        training: has the learning rates.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    towers = towers_of(base)
    named = [(plain_name(name), one) for name, one in base.named_parameters() if one.requires_grad]
    parts = {id(one): part_of(name) for name, one in named if towers is not None and towers.contain(name)}
    for part, own in part_rates(training).items():
        for group in list(optimizer.param_groups) if own is not None else ():
            moved = [weight for weight in group["params"] if parts.get(id(weight)) == part]
            if moved:
                group["params"] = [weight for weight in group["params"] if parts.get(id(weight)) != part]
                optimizer.add_param_group({**group, "params": moved, "lr": group["lr"] * own / training.learning_rate})
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
