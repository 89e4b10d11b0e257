"""Which modules an adapter is on and which are trained in full: one rule for the plan and for the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

from halftune.config.facts.architecture import Tensor, TensorKind
from halftune.config.facts.model import ModelFacts
from halftune.config.sections.model import LoraAdapter, PeftAdapter
from halftune.config.weight_formats import format_of
from halftune.core.errors import PlanError
from halftune.core.table import did_you_mean
from halftune.plan.weights.adapter_types import BY_LORA

if TYPE_CHECKING:
    from halftune.plan.weights.adapter_types import AdapterSpec

HEAD = "lm_head"
_EXPRESSION_SECONDS, _EXPRESSION_MEMORY = 5, 1 << 30  # an adapter of somebody else may bring its expression
_LAYERS = {"conv1d": "Conv1D layers", "embedding": "embeddings"}


def is_hidden(tensor: Tensor) -> bool:
    """Whether it is a matrix between embedding and output layer."""
    return len(tensor.shape) == 2 and tensor.kind != "embedding" and tensor.module != HEAD


def is_table(tensor: Tensor, rows: int) -> bool:
    """Whether it is the embedding of a vocabulary of so many rows."""
    return tensor.kind == "embedding" and tensor.shape[0] == rows


def ends_with(name: str, endings: Iterable[str]) -> bool:
    """Whether a module's full name is one of some names, or ends with a dot and one of them."""
    return any(f".{name}".endswith(f".{ending}") for ending in endings)


def is_target(name: str, asked: str | Sequence[str]) -> bool:
    """Whether a regular expression matches a module's full name, or one of some names is its end; as in peft."""
    return bool(re.fullmatch(asked, name)) if isinstance(asked, str) else ends_with(name, asked)


def saved_around(name: str, saved: Sequence[str]) -> list[str]:
    """Those of a module and the modules around it that are trained in full, the outermost first.

    peft matches any end of a name: ``norm`` means ``input_layernorm``, too.
    """
    parts, endings = name.split("."), tuple(saved)
    every = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return [one for one in every if one.endswith(endings)]


def refuse_saved_targets(names: Iterable[str], saved: Sequence[str]) -> None:
    """Refuse an adapter in a module that is trained in full: peft leaves it out, or saves what it cannot load.

    Args:
        names: full names of the modules that the recipe's targets match.
        saved: ``modules_to_save``.

    Raises:
        PlanError: names the first such module.
    """
    for name in names:
        if around := saved_around(name, saved):
            what = f"{name} would be adapted, and adapter.modules_to_save trains {around[0]} in full"
            raise _conflict(what, "remove it from one of both (target_modules: all-linear leaves it out)")


def _conflict(what: str, remedy: str) -> PlanError:
    return PlanError(what, where="adapter.modules_to_save", remedy=remedy, code="config.keys_conflict")


def wraps(adapter: LoraAdapter | PeftAdapter) -> tuple[TensorKind, ...]:
    """Kinds of weights that an adapter can be on."""
    return BY_LORA if isinstance(adapter, LoraAdapter) else spec_of(adapter).wraps


def spec_of(adapter: PeftAdapter) -> AdapterSpec:
    """The row of an adapter."""
    from halftune.plan.weights.adapter_types import ADAPTER_TYPES  # few runs need it

    return ADAPTER_TYPES[adapter.model_dump()["type"]]


def tied_head(facts: ModelFacts) -> tuple[Tensor, ...]:
    """The output layer that shares the embedding's weight: a module with a name, but no tensor of its own."""
    if not facts.tie_word_embeddings or any(one.kind == "head" for one in facts.likely_tensors):
        return ()
    tables = (one for one in facts.likely_tensors if is_table(one, facts.vocab_size))
    return tuple(Tensor(f"{HEAD}.weight", one.shape, (), "head") for one in tables)[:1]


def touched_by(facts: ModelFacts, adapter: LoraAdapter | PeftAdapter) -> dict[Tensor, list[str]]:
    """The tensors that get an update, with the names of their modules. A regular expression has a time limit.

    Raises:
        PlanError: the expression is not valid, or takes too long.
    """
    tensors, asked = (*facts.likely_tensors, *tied_head(facts)), adapter.target_modules
    if not isinstance(asked, str) or asked == "all-linear":
        return {tensor: names for tensor in tensors if (names := _targets(tensor, adapter))}
    with expression_limits(asked):
        return {tensor: names for tensor in tensors if (names := _targets(tensor, adapter))}


@contextmanager
def expression_limits(asked: str) -> Iterator[None]:
    """Inside, matching a regular expression has a time limit.

    Raises:
        PlanError: the expression is not valid, or takes too long.
    """
    from halftune.core.processes.time_limit import Limits, OutOfTime  # few runs use an expression

    where, remedy = "adapter.target_modules", "all-linear, or a list of names"
    try:
        with Limits(_EXPRESSION_SECONDS, _EXPRESSION_MEMORY):
            yield
    except OutOfTime as error:
        what = f"matching {asked[:80]!r} takes more than {_EXPRESSION_SECONDS} s of CPU time"
        raise PlanError(what, where=where, remedy=remedy, code="config.bad_target_modules") from error
    except re.error as error:
        what = f"{asked[:80]!r} is not a regular expression: {error}"
        raise PlanError(what, where=where, remedy=remedy, code="config.bad_target_modules") from error


def _targets(tensor: Tensor, adapter: LoraAdapter | PeftAdapter) -> list[str]:
    """Names of the modules that get an update."""
    if tensor.kind not in wraps(adapter):
        return []
    if adapter.target_modules == "all-linear":
        every = tensor.modules() if tensor.kind in ("linear", "conv1d") else ()
        return [name for name in every if not saved_around(name, adapter.modules_to_save)]
    return [name for name in tensor.modules() if is_target(name, adapter.target_modules)]


def check_adapter(
    facts: ModelFacts, adapter: LoraAdapter | PeftAdapter, touched: Mapping[Tensor, Sequence[str]]
) -> None:
    """Refuse what peft would refuse after the weights are loaded, and what could not be merged or loaded again.

    Args:
        facts: of the model; its tensors are known.
        adapter: what was asked.
        touched: as ``touched_by`` returns it.

    Raises:
        PlanError: names the key.
    """
    shared = tied_head(facts)
    layers = [one for one in (*facts.tensors, *shared) if one.kind not in ("experts", "parameter")]
    experts = _experts(facts, adapter)
    matches = bool(touched or (experts and adapter.target_modules in ((), "all-linear")))
    _check_targets(layers, shared, adapter, found=matches)
    _check_tied(facts, adapter, touched)
    _check_saved(facts, adapter)
    refuse_saved_targets((*(name for names in touched.values() for name in names), *experts), adapter.modules_to_save)
    kinds = sorted({tensor.module.rpartition(".")[2] for tensor in touched})
    if isinstance(adapter, PeftAdapter):
        _check_type(facts, adapter, kinds)
    else:
        _check_dora(facts, adapter, kinds)


def _experts(facts: ModelFacts, adapter: LoraAdapter | PeftAdapter) -> list[str]:
    """Full names of the modules of fused experts that are adapted."""
    if not isinstance(adapter, LoraAdapter) or not adapter.target_parameters:
        return []
    from halftune.plan.weights.experts import targeted  # few runs adapt experts

    asked = adapter.target_parameters
    named = ((name, one.name.rpartition(".")[2]) for one, _ in targeted(facts, adapter) for name in one.modules())
    return [name for name, leaf in named if ends_with(f"{name}.{leaf}", asked)]


def _not_on(adapter: LoraAdapter | PeftAdapter, tensor: Tensor, name: str) -> PlanError:
    what = f"adapter: {adapter.model_dump()['type']} does not support {_LAYERS.get(tensor.kind, tensor.kind)} ({name})"
    remedy = "use adapter: lora" if tensor.kind in BY_LORA else "remove it from adapter.target_modules"
    return PlanError(what, where="adapter.target_modules", remedy=remedy, code="plan.adapter_unavailable")


def _check_targets(
    layers: Sequence[Tensor], shared: Sequence[Tensor], adapter: LoraAdapter | PeftAdapter, *, found: bool
) -> None:
    """Names that match no module are mistakes: peft would say so only after the weights are loaded."""
    can = [one for one in layers if one.kind in wraps(adapter) and one not in shared]
    known = sorted({one.module.rpartition(".")[2] for one in can})
    if isinstance(adapter.target_modules, tuple):
        # refuse a name that matches nothing, or only layers that this type of adapter cannot be on
        for name in adapter.target_modules:
            matched = [one for one in layers if any(ends_with(module, (name,)) for module in one.modules())]
            if not matched:
                what, remedy = f"no linear layer is named {name!r}", did_you_mean(name, known)
                raise PlanError(what, where="adapter.target_modules", remedy=remedy, code="config.bad_target_modules")
            if not any(one.kind in wraps(adapter) for one in matched):
                raise _not_on(adapter, matched[0], name)
    if not found:
        raise _nothing_matches(layers, adapter, known)


def _nothing_matches(layers: Sequence[Tensor], adapter: LoraAdapter | PeftAdapter, known: list[str]) -> PlanError:
    targets, where = adapter.target_modules, "adapter.target_modules"
    other = next((one for one in layers if one.kind == "conv1d" and one.kind not in wraps(adapter)), None)
    if targets == "all-linear" and other is not None:
        return _not_on(adapter, other, other.module.rpartition(".")[2])
    remedy = f"the model's linear layers: {', '.join(known)}; a regular expression must match a whole name"
    if targets in known:
        remedy = f"write it as a list: [{targets}]"
    elif targets == "all-linear" and adapter.modules_to_save:
        remedy = "adapter.modules_to_save leaves no linear layer: remove modules from it"
    return PlanError(f"no module matches {targets!r}", where=where, remedy=remedy, code="config.bad_target_modules")


def refuse_tied(kind: str, name: str) -> PlanError:
    """The error for an adapter on one of two modules that share a weight: merged, it would move the other one, too."""
    what = f"adapter: {kind} on {name}, whose weight the embedding and the output layer share: it could not be merged"
    remedy = "train it in full (adapter.modules_to_save: [embed_tokens]), or leave it out of adapter.target_modules"
    return PlanError(what, where="adapter.target_modules", remedy=remedy, code="plan.adapter_unavailable")


def _check_tied(facts: ModelFacts, adapter: LoraAdapter | PeftAdapter, touched: Iterable[Tensor]) -> None:
    shared = [one for one in touched if one.kind in ("embedding", "head") and one.shape[0] == facts.vocab_size]
    if facts.tie_word_embeddings and shared:
        raise refuse_tied(adapter.model_dump()["type"], shared[0].module.rpartition(".")[2])


def _check_saved(facts: ModelFacts, adapter: LoraAdapter | PeftAdapter) -> None:
    """Refuse names of no module, and modules that peft cannot train in full."""
    saved, tensors = adapter.modules_to_save, (*facts.tensors, *tied_head(facts))
    if not saved:
        return
    if unknown := [name for name in saved if not any(_contains(tensor, name) for tensor in tensors)]:
        known = set(chain.from_iterable(tensor.module.split(".") for tensor in tensors)) - {"*"}
        what, remedy = f"no module is named {unknown[0]!r}", did_you_mean(unknown[0], known)
        raise PlanError(what, where="adapter.modules_to_save", remedy=remedy, code="config.bad_target_modules")
    for tensor in tensors:
        shared = facts.tie_word_embeddings and is_table(tensor, facts.vocab_size)
        for around in filter(None, (saved_around(name, saved) for name in tensor.modules())):
            _check_saved_around(tensor, around, shared=shared)


def _check_saved_around(tensor: Tensor, around: Sequence[str], *, shared: bool) -> None:
    """Refuse the modules ``around`` a weight that are trained in full; ``shared``: the output layer has it, too."""
    if around[1:]:
        what = f"adapter.modules_to_save trains {around[0]} in full, and {around[1]} in it once more"
        raise _conflict(what, "remove one of them; a name also matches longer names that end with it")
    if shared and around[0] != tensor.module:
        what = f"{around[0]} contains the embedding, whose weight the output layer shares"
        raise _conflict(what, "name smaller modules, e.g. [embed_tokens]")
    if f"{tensor.module}.".startswith(f"{around[0]}.*."):
        what, where = f"{around[0]} is a list of modules, which peft cannot save", "adapter.modules_to_save"
        raise PlanError(what, where=where, remedy="name a module in it", code="config.bad_target_modules")


def _contains(tensor: Tensor, name: str) -> bool:
    """Whether a name is the end of the names of modules of this tensor, or of modules around them."""
    parents = (module.split(".") for module in tensor.modules())
    return any(ends_with(".".join(parts[: i + 1]), (name,)) for parts in parents for i in range(len(parts)))


def _check_dora(facts: ModelFacts, adapter: LoraAdapter, kinds: list[str]) -> None:
    lost = [kind for kind in kinds if kind in facts.expert_modules]
    if adapter.use_dora and lost:
        what = f"DoRA on {', '.join(lost)} of {facts.model_type}: peft has no DoRA for names of experts"
        others = ", ".join(kind for kind in kinds if kind not in lost)
        remedy = f"adapter.use_dora: false, or adapter.target_modules: [{others}]"
        raise PlanError(what, where="adapter.use_dora", remedy=remedy, code="plan.dora_on_experts")


def _check_type(facts: ModelFacts, adapter: PeftAdapter, kinds: list[str]) -> None:
    """Refuse bases for which peft has no such adapter, or could not load it again."""
    what, kind = "", adapter.model_dump()["type"]
    if format_of(facts.quantization).bytes_per_param is not None:
        what = f"quantised weights ({facts.quantization})"
    elif kind == "oft" and "kv_b_proj" in kinds:  # of multi-head latent attention
        what = "kv_b_proj, whose inputs have four dimensions, which peft takes for images"
    if what:
        what = f"adapter: {kind} does not support {what}"
        raise PlanError(what, where="adapter", remedy="use adapter: lora", code="plan.adapter_unavailable")
