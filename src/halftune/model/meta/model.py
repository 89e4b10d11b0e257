"""Builds a recipe's model from config.json without weights, for the dtype trace and the paper profiler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.facts.config_file import config_file
from halftune.config.facts.families import OWN
from halftune.config.run import RunConfig
from halftune.config.sections.model import ModelSection
from halftune.core.errors import HalftuneError, ModelError
from halftune.model.adapters import attach_adapter
from halftune.model.attention.experts import route_experts
from halftune.model.attention.qk_dtype import cast_qk_to_compute_dtype
from halftune.model.files.architectures import multimodal_auto, no_progress_bars, own_architectures, remote_class
from halftune.model.files.architectures import read_config as read_checkpoint_config
from halftune.model.float8_layers import use_float8
from halftune.model.load.own_dtypes import mark_kept_by_code
from halftune.model.load.remote_code import attention_for, remote_code_error
from halftune.model.load.runtime_buffers import compute_in_fp32
from halftune.model.load.towers import for_parts
from halftune.plan import Plan
from halftune.precision.dtypes import stays_fp32, torch_dtype
from halftune.precision.trace.fake_tensors import NEEDS_VALUES, FakeTensors


def read_config(section: ModelSection) -> PretrainedConfig:
    """Return the model's configuration object; imports its remote code if trusted.

    Raises:
        ModelError: config.json or the code beside it cannot be read; names the first line of what went wrong.
    """
    name = section.name_or_path
    if name.startswith("builtin:"):
        with own_architectures():
            return AutoConfig.for_model(**BUILTIN_MODELS[name.removeprefix("builtin:")])
    folder = config_file(section).parent
    try:
        return read_checkpoint_config(folder, trust_remote_code=section.trust_remote_code)
    except Exception as error:  # the model's own code may raise anything
        raise remote_code_error(error, section, folder, "the model's configuration cannot be made") from error


def build(config: PretrainedConfig, section: ModelSection, plan: Plan, attention: str) -> PreTrainedModel:
    """Build the model with random weights in the plan's storage dtype, or without weights inside ``FakeTensors``.

    Args:
        config: what is built.
        section: whose code builds it.
        plan: as it would run.
        attention: name in transformers' interface; code of a checkpoint may be built with another.

    Raises:
        ModelError: the model's code cannot be imported or cannot build it.
    """
    remote = section.trust_remote_code and config.model_type not in OWN
    dtype = torch_dtype(plan.precision.storage.value)
    try:
        if remote and "auto_map" in vars(config):
            attention = _asked_for(config_file(section).parent, plan, attention)
        with no_progress_bars():
            autos = (AutoModelForCausalLM, multimodal_auto(config))
            for auto in autos if plan.towers is None else reversed(autos):  # with towers, the class of config.json
                if type(config) in auto._model_mapping or "auto_map" in vars(config):
                    options = {"dtype": dtype, "trust_remote_code": remote}
                    try:
                        return auto.from_config(config, attn_implementation=attention, **options)
                    except KeyError as error:  # some towers look the name up in a table of their own
                        if error.args != (attention,):
                            raise
                    return auto.from_config(config, attn_implementation=for_parts(config, attention), **options)
            return _by_type(config)._from_config(config, dtype=dtype, attn_implementation=attention)
    except (HalftuneError, *NEEDS_VALUES):
        raise
    except Exception as error:  # the model's own code may raise anything
        raise remote_code_error(error, section, None) from error


def _asked_for(folder: Path, plan: Plan, attention: str) -> str:
    """The ``attn_implementation``: ``attention`` if the code uses transformers' interface, else that of training."""
    ours = f"halftune_{plan.attention.softmax.value}"
    chosen = attention_for(folder, plan, ours) if remote_class(folder) else ours
    return attention if chosen == ours else chosen


def _by_type(config: PretrainedConfig) -> Any:
    """The text-generating class of transformers for a config that no auto class supports."""
    import importlib

    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for name, found in vars(module).items():
        generates = name.endswith(("ForConditionalGeneration", "ForCausalLM"))
        if generates and vars(found).get("__annotations__", {}).get("config") in (type(config), type(config).__name__):
            return found
    what = f"transformers has no language model for {config.model_type}"
    raise ModelError(what, remedy="use a language model in model.name_or_path", code="model.not_causal")


def prepare(model: PreTrainedModel, config: RunConfig, plan: Plan, mode: FakeTensors | None) -> nn.Module:
    """Prepare the built model as ``load_model`` and ``attach_adapter`` do: dtypes, hooks, adapter."""
    keep = plan.precision.keep_fp32.value
    storage = torch_dtype(plan.precision.storage.value)
    listed = model._get_dtype_plan(storage) if plan.precision.storage.value != "fp32" else {}
    own = re.compile("|".join(entry.replace("*", ".*") for entry in listed) or r"(?!)")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and (stays_fp32(name, parameter, keep) or own.search(name)):
            parameter.data = parameter.data.float()
    mark_kept_by_code(model, plan)
    compute_in_fp32(model, config.model, stored=True)
    model.config.use_cache = False
    route_experts(model, plan)
    cast_qk_to_compute_dtype(model, plan)
    fresh = config.adapter.model_copy(update={"name_or_path": None, "init": "default"})  # of the same dtypes
    adapted = attach_adapter(model, fresh, plan, config.training.seed)
    use_float8(adapted, plan, emulate=mode is None)  # tensors without values need no device
    if mode is not None:
        mode.strip(adapted)
    return adapted.train()
