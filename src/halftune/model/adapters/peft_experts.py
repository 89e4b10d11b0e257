"""Keeps LoRA on linear layers of mixture-of-experts models, which peft would move to the fused experts.

In transformers 5 the experts of many families are 3-D parameters instead of linear layers. To load older adapters,
peft maps ``gate_proj``, ``up_proj``, ``down_proj`` and similar targets of these families to experts, even if linear
layers (shared experts, dense layers) have these names. Here a target is a linear layer: adapters are attached without
that mapping, and saved so that peft, with it, finds the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, VeraConfig, get_peft_model_state_dict
from transformers import PreTrainedModel

try:
    from peft.utils import transformers_weight_conversion as conversion
except ImportError:  # a peft that rewrites nothing
    conversion: Any = None

_WEIGHT = ".weight"


def rewrites(model: PreTrainedModel) -> bool:
    """Whether peft rewrites target modules for this model's family."""
    return _rewritten(model, "all-linear").target_modules != "all-linear"


def mistaken_for_experts(model: PreTrainedModel, modules: list[str]) -> list[str]:
    """The module names that peft would map to experts."""
    leaves = {name.rpartition(".")[2] for name in modules}
    lost = {leaf for leaf in leaves if _is_lost(model, leaf)}
    return [name for name in modules if name.rpartition(".")[2] in lost]


def _is_lost(model: PreTrainedModel, leaf: str) -> bool:
    try:
        return leaf not in (_rewritten(model, [leaf]).target_modules or ())
    except ValueError:  # peft also requires the other half of a fused pair: an expert's name
        return True


def _rewritten(model: PreTrainedModel, targets: str | list[str]) -> LoraConfig:
    config = LoraConfig(target_modules=targets)
    if conversion is not None:
        conversion.convert_peft_config_for_transformers(config, model=model, conversions=None)
    return config


@contextmanager
def unchanged_targets() -> Iterator[None]:
    """Inside, peft does not rewrite target modules."""
    if conversion is None:
        yield
        return
    original: Callable[..., None] = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = original


def for_plain_peft(adapted: PeftModel) -> PeftConfig:
    """The adapter's config in a form that plain peft, with its rewriting, maps to the adapted modules.

    Linear layers with names of experts become ``target_parameters``: peft then adds B·A to their weight, which is the
    same function of the same tensors. It has no dropout, which a finished adapter does not need. VeRA names whole
    modules.
    """
    config: Any = copy.deepcopy(adapted.peft_config["default"])
    base: Any = adapted.get_base_model()
    if isinstance(config, VeraConfig):  # its matrices are as wide as the widest target: towers, too, have a q_proj
        config.target_modules = sorted(adapted.base_model.targeted_module_names)  # type: ignore[arg-type,union-attr]
    if not isinstance(config, LoraConfig) or not rewrites(base):
        return config
    modules: list[str] = sorted(adapted.base_model.targeted_module_names)  # type: ignore[arg-type,union-attr]
    lost = mistaken_for_experts(base, modules)
    config.target_modules = [name for name in modules if name not in lost]
    if lost:
        config.target_parameters = [*(config.target_parameters or ()), *(name + _WEIGHT for name in lost)]
        config.lora_dropout = 0.0
    return config


def not_loaded_by_peft(adapted: torch.nn.Module) -> list[str]:
    """Names of the adapter's tensors that plain peft would leave out with a warning.

    Before it loads an adapter, peft renames its tensors by transformers' rules for old checkpoints. A rule that also
    matches today's names gives names that the model does not have.
    """
    if conversion is None or not isinstance(adapted, PeftModel):
        return []
    stored = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    shapes = {name: tensor.to("meta") for name, tensor in stored.items()}
    found = conversion.convert_peft_adapter_state_dict_for_transformers(adapted, for_plain_peft(adapted), shapes)
    return sorted(stored.keys() - found.keys())


def restore_targets(config: LoraConfig, model: PreTrainedModel) -> bool:
    """Undo ``for_plain_peft`` in place: weights of linear layers become target modules again.

    Returns:
        Whether there were any; if so, the adapter must be loaded under ``unchanged_targets``.
    """
    if not isinstance(config, LoraConfig) or isinstance(config.target_modules, str):
        return False
    linear = {name + _WEIGHT for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    parameters = config.target_parameters or []
    ours = [name.removesuffix(_WEIGHT) for name in parameters if name in linear]
    if not ours:
        return False
    config.target_modules = [*(config.target_modules or ()), *ours]
    config.target_parameters = [name for name in parameters if name not in linear] or None
    return True
