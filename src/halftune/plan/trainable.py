"""How many weights are trained, and in which modules, from names and shapes alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from halftune.config.facts.model import ModelFacts
from halftune.config.facts.weights import Tensor
from halftune.config.sections.adapter import AdapterSection, LoraAdapter
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.core.table import did_you_mean

HEAD = "lm_head"
# Names of linear layers that peft takes for names of experts, by family: it has no DoRA there.
_GATED = ("gate_proj", "up_proj", "down_proj", "gate")
_EXPERTS = {"mixtral": ("w1", "w2", "w3", "gate"), "qwen3_moe": _GATED, "qwen3_next": _GATED, "olmoe": _GATED}


@dataclass(frozen=True)
class Adapted:
    """What an adapter touches.

    Attributes:
        count: trained weights, with the reason.
        adapter: those of them in low-rank updates (and DoRA's magnitudes).
        saved_whole: those in ``modules_to_save``, which exist beside the frozen ones.
        inputs: (input width, number of modules) of every wrapped linear layer.
        dora_outputs: output widths of all wrapped layers, summed, where DoRA scales them; else 0.
    """

    count: Choice[int]
    adapter: int = 0
    saved_whole: int = 0
    inputs: tuple[tuple[int, int], ...] = ()
    dora_outputs: int = 0


def count_trainable(facts: ModelFacts, adapter: AdapterSection) -> Adapted:
    """Counts trained weights: exact for a described family, else for a Llama-like model of these sizes.

    Raises:
        PlanError: an adapter would touch nothing: no module has the names asked for; or DoRA is asked for where peft
            could not load it again.
    """
    if not isinstance(adapter, LoraAdapter):
        return Adapted(Choice(facts.num_parameters, "full fine-tuning: every weight"))
    tensors = facts.likely_tensors
    touched = {tensor: names for tensor in tensors if (names := _targets(tensor, adapter))}
    if facts.tensors:
        _check_targets(tensors, adapter, found=bool(touched))
        _check_saved(facts, adapter)
        _check_dora(facts, adapter, sorted({tensor.module.rpartition(".")[2] for tensor in touched}))
    low_rank = sum(_update_size(tensor, adapter) * len(names) for tensor, names in touched.items())
    whole = sum(tensor.size * _matching(tensor, adapter.modules_to_save) for tensor in tensors)
    if facts.tie_word_embeddings and HEAD in adapter.modules_to_save and not _saves_embedding(tensors, adapter):
        whole += facts.vocab_size * facts.hidden_size  # a tied head is saved together with the embedding
    modules = sum(len(names) for names in touched.values())
    kinds = sorted({tensor.module.rpartition(".")[2] for tensor in touched})
    reason = f"LoRA of rank {adapter.rank} on {modules} modules ({', '.join(kinds)})"
    if adapter.use_dora:
        reason += ", with DoRA's magnitudes"
    if whole:
        reason += f"; {', '.join(adapter.modules_to_save)} in full"
    if not facts.tensors:
        reason += f"; estimated, {facts.model_type} is not described"
    inputs = tuple((tensor.shape[-1], len(names)) for tensor, names in touched.items())
    outputs = sum(tensor.shape[0] * len(names) for tensor, names in touched.items()) if adapter.use_dora else 0
    return Adapted(Choice(low_rank + whole, reason), low_rank, whole, inputs, outputs)


def _targets(tensor: Tensor, adapter: LoraAdapter) -> list[str]:
    """Names of the modules that get an update, as peft matches them."""
    target = adapter.target_modules
    if tensor.kind == "parameter":
        return []
    if target == "all-linear":
        return list(tensor.modules()) if tensor.kind == "linear" and tensor.module != HEAD else []
    if isinstance(target, str):
        try:
            return [name for name in tensor.modules() if re.fullmatch(target, name)]
        except re.error as error:
            what = f"{target!r} is not a regular expression: {error}"
            raise PlanError(what, where="adapter.target_modules", remedy="all-linear, or a list of names") from error
    return [name for name in tensor.modules() if _ends_with(name, target)]


def _matching(tensor: Tensor, modules: tuple[str, ...]) -> int:
    """How many of these tensors lie in one of the modules (or below it)."""
    if not modules:
        return 0
    parents = (name.split(".") for name in tensor.modules())
    return sum(any(_ends_with(".".join(parts[:i]), modules) for i in range(1, len(parts) + 1)) for parts in parents)


def _ends_with(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _update_size(tensor: Tensor, adapter: LoraAdapter) -> int:
    rows, columns = tensor.shape
    if not adapter.use_dora:
        return adapter.rank * (rows + columns)
    return adapter.rank * (rows + columns) + (rows if tensor.kind == "linear" else columns)


def _saves_embedding(tensors: tuple[Tensor, ...], adapter: LoraAdapter) -> bool:
    return any(tensor.kind == "embedding" and _matching(tensor, adapter.modules_to_save) for tensor in tensors)


def _check_targets(tensors: tuple[Tensor, ...], adapter: LoraAdapter, *, found: bool) -> None:
    """Names that match no module are mistakes: peft would say so only after the weights are loaded."""
    modules = [module for tensor in tensors if tensor.kind != "parameter" for module in tensor.modules()]
    known = sorted({module.rpartition(".")[2] for module in modules})
    targets, where = adapter.target_modules, "adapter.target_modules"
    for name in targets if isinstance(targets, tuple) else ():
        if not any(_ends_with(module, (name,)) for module in modules):
            raise PlanError(f"no linear layer is named {name!r}", where=where, remedy=did_you_mean(name, known))
    if not found:
        remedy = f"the model's linear layers: {', '.join(known)}; a regular expression must match a whole name"
        if targets in known:
            remedy = f"write it as a list: [{targets}]"
        raise PlanError(f"no module matches {targets!r}", where=where, remedy=remedy)


def _check_saved(facts: ModelFacts, adapter: LoraAdapter) -> None:
    for name in adapter.modules_to_save:
        if name != HEAD and not any(_matching(tensor, (name,)) for tensor in facts.tensors):
            known = {part for tensor in facts.tensors for part in tensor.module.split(".") if part != "*"} | {HEAD}
            remedy = did_you_mean(name, known)
            raise PlanError(f"no module is named {name!r}", where="adapter.modules_to_save", remedy=remedy)


def _check_dora(facts: ModelFacts, adapter: LoraAdapter, kinds: list[str]) -> None:
    lost = [kind for kind in kinds if kind in _EXPERTS.get(facts.model_type, ())]
    if adapter.use_dora and lost:
        what = f"DoRA on {', '.join(lost)} of {facts.model_type}: peft takes these names for experts and has none there"
        others = ", ".join(kind for kind in kinds if kind not in lost)
        remedy = f"adapter.use_dora: false, or adapter.target_modules: [{others}]"
        raise PlanError(what, where="adapter.use_dora", remedy=remedy)
