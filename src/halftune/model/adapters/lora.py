"""LoRA, rsLoRA and DoRA by peft, with deterministic initial weights and planned dtypes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from peft.utils.integrations import dequantize_module_weight
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from halftune.config.sections.model import LoraAdapter, PeftAdapter
from halftune.core.errors import ConfigError
from halftune.model.adapters import cast_adapter, share_tied
from halftune.model.adapters.all_linear import without_routers
from halftune.model.adapters.low_rank_experts import unquantised_names
from halftune.model.adapters.peft_experts import mistaken_for_experts, unchanged_targets
from halftune.model.files.architectures import ignore_peft_warnings
from halftune.model.load.towers import towers_of
from halftune.model.tokenizer.vocabulary import tied_names, vocabulary_modules
from halftune.plan import Plan
from halftune.plan.weights.targets import is_target, refuse_saved_targets, refuse_tied, wraps


def attach(model: PreTrainedModel, adapter: LoraAdapter, plan: Plan, seed: int) -> PeftModel:
    """Attach adapters to the target modules; all other weights are frozen.

    Raises:
        ConfigError: a target or a module to save does not exist in this model, or peft cannot load such an adapter.
    """
    config, tied = _config(model, adapter, plan), tied_names(model)
    with torch.random.fork_rng(devices=[]), ignore_peft_warnings(), unchanged_targets(), unquantised_names(model):
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        except (ValueError, TypeError, NotImplementedError) as error:
            remedy = "choose other adapter.target_modules or adapter.modules_to_save"
            what = f"rejected by peft: {error}"
            raise ConfigError(what, where="adapter", remedy=remedy, code="config.bad_target_modules") from error
    assert isinstance(adapted, PeftModel)
    if adapter.use_dora:
        _check_dora(adapted)
    if tied:
        share_tied(adapted)
    cast_adapter(adapted, plan)
    if adapter.use_dora:
        _measure_magnitudes(adapted)
    if adapter.name_or_path is not None:
        from halftune.model.adapters.start import load_start  # few runs start from an adapter

        load_start(adapted, adapter)
    if towers_of(model) is not None:
        from halftune.model.load.parts import keep_in_graph  # few models have towers

        keep_in_graph(adapted, plan)
    return adapted


def _config(model: PreTrainedModel, adapter: LoraAdapter, plan: Plan) -> LoraConfig:
    """The adapter as peft describes it."""
    saved, tied = find_modules_to_save(model, adapter, plan), tied_names(model)
    # peft ties the copies itself where it knows the embedding's name
    known = saved and tied and tied[0].rpartition(".")[2] in EMBEDDING_LAYER_NAMES and tied[0].endswith(tuple(saved))
    return LoraConfig(
        task_type=task_type(plan),
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # peft takes fractions, too
        lora_dropout=adapter.dropout,
        target_modules=_targets(model, adapter, saved or ()),
        target_parameters=list(adapter.target_parameters) or None,
        exclude_modules=_left_out(model, plan),
        modules_to_save=saved,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        init_lora_weights="gaussian" if adapter.init == "gaussian" else True,
        bias="none",
        ensure_weight_tying=bool(known),
    )


def _targets(model: PreTrainedModel, adapter: LoraAdapter, saved: Sequence[str]) -> str | list[str]:
    """The targets as they were written, or as full names where peft would match other modules, too."""
    asked = adapter.target_modules
    if asked == "all-linear":
        return without_routers(model, saved)
    names = find_targets(model, adapter)
    matched = [name for name, _ in model.named_modules() if is_target(name, asked)]
    if matched != names:
        return names
    return asked if isinstance(asked, str) else list(asked)


def _left_out(model: PreTrainedModel, plan: Plan) -> str | None:
    if towers_of(model) is None:
        return None
    from halftune.model.load.parts import left_out

    return left_out(model, plan)


def _check_dora(adapted: PeftModel) -> None:
    """Refuse adapters that peft cannot load again: it supports DoRA on modules only.

    Raises:
        ConfigError: names the modules that peft treats as experts.
    """
    base: Any = adapted.get_base_model()
    modules: list[str] = list(adapted.base_model.targeted_module_names)  # type: ignore[arg-type,union-attr]
    if lost := mistaken_for_experts(base, modules):
        kind, kinds = base.config.model_type, sorted({name.rpartition(".")[2] for name in lost})
        others = sorted({name.rpartition(".")[2] for name in modules} - set(kinds))
        what = f"DoRA on {', '.join(kinds)} of {kind}: peft treats these as experts, on which it has no DoRA"
        remedy = f"adapter.use_dora: false, or adapter.target_modules: [{', '.join(others)}]"
        raise ConfigError(what, where="adapter.use_dora", remedy=remedy, code="plan.dora_on_experts")


def _measure_magnitudes(adapted: PeftModel) -> None:
    """Initialise DoRA's magnitudes in fp32. peft computes the norms in the weights' dtype; bf16 rounding (up to 0.4 %)
    would change the model before the first step.
    """
    layers: list[Any] = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        for dora in layer.lora_magnitude_vector.values():
            weight = dequantize_module_weight(layer.get_base_layer()).detach().float()
            norms = dora.get_weight_norm(weight=weight, lora_weight=torch.zeros(()), scaling=1.0)
            dora.weight.data.copy_(norms)  # lora_B is zero, so these are the norms of the sum


def find_targets(model: PreTrainedModel, adapter: LoraAdapter | PeftAdapter) -> list[str]:
    """Full names of the layers that an expression or names mean; checks that each entry matches one.

    Raises:
        ConfigError, PlanError: an entry matches no layer, a layer in a module that is trained in full, or one of two
            layers that share a weight.
    """
    asked = adapter.target_modules
    every = [name for name, module in model.named_modules() if isinstance(module, layer_types(adapter))]
    endings = sorted({name.rpartition(".")[2] for name in every})
    known = f"this model has: {', '.join(endings)}"
    if isinstance(asked, str):
        hint = f"write it as a list: [{asked}]" if asked in endings else f"it must match full names; {known}"
        _check_pattern(asked, every, hint)
    for ending in () if isinstance(asked, str) else asked:
        if not any(is_target(name, (ending,)) for name in every):
            close = get_close_matches(ending, endings, n=1)
            raise _bad_targets(
                f"no module is called {ending!r}", f"did you mean {close[0]}? {known}" if close else known
            )
    names = [name for name in every if is_target(name, asked)]
    refuse_saved_targets(names, adapter.modules_to_save)
    if shared := [name for name in tied_names(model) if name in names]:
        raise refuse_tied(adapter.model_dump()["type"], shared[0])
    return names


_TYPES: dict[str, type[torch.nn.Module]] = {
    "linear": torch.nn.Linear,
    "conv1d": Conv1D,
    "embedding": torch.nn.Embedding,
}


def layer_types(adapter: LoraAdapter | PeftAdapter) -> tuple[type[torch.nn.Module], ...]:
    """Classes of the layers that an adapter can be on, as the plan counts them."""
    return tuple(kind for name, kind in _TYPES.items() if name in wraps(adapter))


def _check_pattern(asked: str, names: Sequence[str], hint: str) -> None:
    try:
        pattern = re.compile(asked)
    except re.error as error:
        raise _bad_targets(f"{asked!r} is not a regular expression: {error}") from error
    if not any(map(pattern.fullmatch, names)):
        raise _bad_targets(f"regular expression {asked!r} matches no module", hint)


def _bad_targets(what: str, remedy: str = "") -> ConfigError:
    return ConfigError(what, where="adapter.target_modules", remedy=remedy, code="config.bad_target_modules")


def task_type(plan: Plan) -> TaskType:
    """What peft calls the task of the method."""
    return TaskType.SEQ_CLS if plan.method.head.value == "score" else TaskType.CAUSAL_LM


def find_modules_to_save(model: PreTrainedModel, adapter: LoraAdapter | PeftAdapter, plan: Plan) -> list[str] | None:
    """The modules to train in full: those of the config, a score head, and with added tokens the vocabulary's.

    Of an embedding and an output layer that share a weight, both or none.

    Raises:
        ConfigError: a module does not exist in this model.
    """
    names = {name.rpartition(".")[2] for name, _ in model.named_modules() if name}
    for module in adapter.modules_to_save:
        if module.rpartition(".")[2] not in names:
            close = get_close_matches(module, sorted(names), n=1)
            remedy = f"did you mean {close[0]}?" if close else "write names such as embed_tokens, lm_head"
            what = f"no module is called {module!r}"
            raise ConfigError(what, where="adapter.modules_to_save", remedy=remedy, code="config.bad_target_modules")
    more = vocabulary_modules(model) if plan.added_tokens is not None else []
    more += ["score"] if plan.method.head.value == "score" else []
    if towers_of(model) is not None:
        from halftune.model.load.parts import saved_parts

        more += saved_parts(model, plan)
    saved, tied = tuple(dict.fromkeys((*adapter.modules_to_save, *more))), tied_names(model)
    missing = [name for name in tied if not name.endswith(saved)]
    return [*saved, *(missing if len(missing) < len(tied) else ())] or None
