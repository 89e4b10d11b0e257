"""LoRA, rsLoRA and DoRA through peft, with deterministic first weights and planned dtypes."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from transformers import PreTrainedModel

from halftune.config.sections.adapter import LoraAdapter
from halftune.core.errors import ConfigError
from halftune.model.adapters.mixtures import taken_for_experts, targets_as_written
from halftune.model.adapters.targets import without_routers
from halftune.model.adapters.weights import cast_adapter
from halftune.model.quiet import quiet_peft
from halftune.model.towers import towers_of
from halftune.model.tying import is_tied
from halftune.plan import Plan


def attach(model: PreTrainedModel, adapter: LoraAdapter, plan: Plan, seed: int) -> PeftModel:
    """The model with adapters on its target modules; everything else is frozen.

    Raises:
        ConfigError: a target or a module to save does not exist in this model (names those that do), or peft could not
            load the adapter again.
    """
    targets = without_routers(model) if adapter.target_modules == "all-linear" else _targets(model, adapter)
    towers = towers_of(model)
    saved = _modules_to_save(model, adapter)
    tied = is_tied(model) and any(name.rpartition(".")[2] in EMBEDDING_LAYER_NAMES for name in saved or ())
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # peft takes fractions, too
        lora_dropout=adapter.dropout,
        target_modules=targets,
        exclude_modules=None if towers is None else towers.pattern,
        modules_to_save=saved,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        bias="none",
        ensure_weight_tying=tied,
    )
    with torch.random.fork_rng(devices=[]), quiet_peft(), targets_as_written():
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            remedy = "choose other adapter.target_modules or adapter.modules_to_save"
            raise ConfigError(f"peft refuses: {error}", where="adapter", remedy=remedy) from error
    assert isinstance(adapted, PeftModel)
    if adapter.use_dora:
        _check_dora(adapted)
    cast_adapter(adapted, plan)
    if adapter.use_dora:
        _measure_magnitudes(adapted)
    return adapted


def _check_dora(adapted: PeftModel) -> None:
    """Refuses what plain peft could not load again: it has DoRA for modules only.

    Raises:
        ConfigError: names the modules that peft takes for experts.
    """
    base: Any = adapted.get_base_model()
    modules: list[str] = list(adapted.base_model.targeted_module_names)  # type: ignore[arg-type,union-attr]
    if lost := taken_for_experts(base, modules):
        kind, kinds = base.config.model_type, sorted({name.rpartition(".")[2] for name in lost})
        others = sorted({name.rpartition(".")[2] for name in modules} - set(kinds))
        what = f"DoRA on {', '.join(kinds)} of {kind}: peft takes these names for experts and has none there"
        remedy = f"adapter.use_dora: false, or adapter.target_modules: [{', '.join(others)}]"
        raise ConfigError(what, where="adapter.use_dora", remedy=remedy)


def _measure_magnitudes(adapted: PeftModel) -> None:
    """DoRA's magnitudes from the frozen weights in fp32: peft takes the norms in the weights' own dtype, and rounded to
    bf16 they are off by up to 0.4 %, so that the adapter would change the model before its first step.
    """
    layers: list[Any] = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        for dora in layer.lora_magnitude_vector.values():
            weight = layer.get_base_layer().weight.detach().float()
            norms = dora.get_weight_norm(weight=weight, lora_weight=torch.zeros(()), scaling=1.0)
            dora.weight.data.copy_(norms)  # lora_B is zero, so these are the norms of the sum


def _targets(model: PreTrainedModel, adapter: LoraAdapter) -> str | list[str]:
    """What peft is to match, after checking that each part of it matches something.

    Raises:
        ConfigError: something matches nothing.
    """
    asked = adapter.target_modules
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding)]
    where, endings = "adapter.target_modules", sorted({name.rpartition(".")[2] for name in names})
    known = f"this model has: {', '.join(endings)}"
    if isinstance(asked, str):
        try:
            found = any(re.fullmatch(asked, name) for name in names)
        except re.error as error:
            raise ConfigError(f"{asked!r} is not a regular expression: {error}", where=where) from error
        if not found:
            hint = f"write it as a list: [{asked}]" if asked in endings else f"it must match whole names; {known}"
            raise ConfigError(f"the expression {asked!r} matches no module", where=where, remedy=hint)
        return asked
    for ending in asked:
        if not any(name == ending or name.endswith(f".{ending}") for name in names):
            close = get_close_matches(ending, endings, n=1)
            remedy = f"did you mean {close[0]}? {known}" if close else known
            raise ConfigError(f"no module is called {ending!r}", where=where, remedy=remedy)
    return list(asked)


def _modules_to_save(model: PreTrainedModel, adapter: LoraAdapter) -> list[str] | None:
    names = {name.rpartition(".")[2] for name, _ in model.named_modules() if name}
    for module in adapter.modules_to_save:
        if module.rpartition(".")[2] not in names:
            close = get_close_matches(module, sorted(names), n=1)
            remedy = f"did you mean {close[0]}?" if close else "write names such as embed_tokens, lm_head"
            raise ConfigError(f"no module is called {module!r}", where="adapter.modules_to_save", remedy=remedy)
    return list(adapter.modules_to_save) or None
