"""Builds an architecture on torch's meta device and lists its weights, for ``config.facts.architecture``.

Reads a request as JSON from standard input, and writes the answer to standard output.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from halftune.core.errors import HalftuneError
from halftune.model.adapters.all_linear import linear_layers
from halftune.model.attention.experts import LOOP, is_grouped
from halftune.model.attention.flash_check import window_fault
from halftune.model.attention.packing_check import silent
from halftune.model.files.architectures import multimodal_auto, own_architectures
from halftune.model.files.load_errors import LOAD_ERRORS, first_line
from halftune.model.load.towers import Towers, tower_names

# Standard names of sizes that config classes map to their own names.
_STANDARD = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def describe(raw: dict[str, Any], *, multimodal: bool) -> dict[str, Any]:
    """List the weights and settings of an architecture; ``{"error": …}`` if transformers cannot build it.

    Returns ``{"missing": …}`` if a package is missing, since that is not a property of the architecture.

    Args:
        raw: the parsed config.json; remote code is not executed.
        multimodal: build the class with towers, not the language model alone.

    Returns:
        ``text``: the decoder's settings with all defaults. ``tied``: whether the head shares the embedding's weight.
        ``tensors``, and ``towers`` for those of the towers: entries of (name with ``*`` for the layer, shape, kind,
        layers). ``lacks``: the attention implementations that the decoder's class does not support; ``windows`` if
        FlashAttention would lose those of its masks.
        ``experts``: names of linear layers that peft treats as experts.
    """
    try:
        with silent(), own_architectures(), torch.random.fork_rng(devices=[]):
            left_out = ("auto_map", "quantization_config", "dtype", "torch_dtype", "_attn_implementation")
            kept = {key: value for key, value in raw.items() if key not in left_out}
            # infinity, as transformers saves it
            config = AutoConfig.for_model(**PreTrainedConfig._decode_special_floats(kept))
            auto = multimodal_auto(config) if multimodal else AutoModelForCausalLM
            with torch.device("meta"), initialization.no_init_weights():
                # eager, so that no config names a kernel that is looked up on the hub
                options = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": False}
                model = auto.from_config(config, **options)
                model.tie_weights()
            return _listed(config, model, multimodal)
    except ImportError as error:  # the package may be installed later
        return {"missing": first_line(error)}
    except (*LOAD_ERRORS, StrictDataclassError, HalftuneError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {first_line(error)}"}


def _listed(config: PreTrainedConfig, model: PreTrainedModel, multimodal: bool) -> dict[str, Any]:
    towers = Towers(Path(), tower_names(model) if multimodal else (), ())
    kinds = _kinds(model)
    groups: dict[bool, dict[tuple[str, tuple[int, ...], str], list[int]]] = {False: {}, True: {}}
    for name, parameter in model.named_parameters():
        layer = _LAYER.search(name)
        shape = tuple(parameter.shape)
        if isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D) and len(shape) == 2:
            shape = shape[::-1]  # Conv1D stores [in, out]
        key = (_LAYER.sub("*", name, count=1), shape, kinds.get(name, "parameter"))
        groups[towers.own(name)].setdefault(key, []).extend([int(layer[0])] if layer else [])
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    return {
        "text": _settings(config),
        "lacks": _lacks(config, model),
        "experts": _expert_names(config, model),
        "tied": head is not None and table is not None and _weight(head) is _weight(table),
        "towers": [[name, shape, kind, layers] for (name, shape, kind), layers in groups[True].items()],
        "tensors": [[name, shape, kind, layers] for (name, shape, kind), layers in groups[False].items()],
    }


def _lacks(config: PreTrainedConfig, model: PreTrainedModel) -> list[str]:
    """Attention implementations of transformers that the decoder's class declares as unsupported; lost windows."""
    found = model.get_decoder()
    decoder = found if isinstance(found, PreTrainedModel) else model
    flags = {"flash": "_supports_flash_attn", "sdpa": "_supports_sdpa", "flex": "_supports_flex_attn"}
    lacking = [name for name, flag in flags.items() if not getattr(decoder, flag, True)]
    fault = "" if "flash" in lacking else window_fault(config)
    return [*lacking, *filter(None, [fault])]


def _expert_names(config: PreTrainedConfig, model: PreTrainedModel) -> list[str]:
    """Names of linear layers that peft treats as experts."""
    if "expert" not in json.dumps(config.to_dict(), default=str):
        return []
    from halftune.model.adapters.peft_experts import mistaken_for_experts  # imports peft

    linear, _, _ = linear_layers(model)
    return sorted({name.rpartition(".")[2] for name in mistaken_for_experts(model, list(linear))})


def _kinds(model: PreTrainedModel) -> dict[str, str]:
    """Kind of every weight that belongs to a layer of a known kind."""
    modules: list[tuple[str, Any]] = list(model.named_modules())
    linear, routers, refused = linear_layers(model)
    tables = {f"{name}.weight": "embedding" for name, module in modules if isinstance(module, nn.Embedding)}
    conv1d = {name for name, module in modules if isinstance(module, Conv1D)}
    plain = {name: "conv1d" if name in conv1d else "linear" for name in linear}
    adapted = {f"{name}.weight": "router" if name in routers | refused else plain[name] for name in linear}
    experts = {
        f"{name}.{leaf}": "experts"
        for name, module in modules
        if is_grouped(module) and module.config._experts_implementation != LOOP
        for leaf, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3
    }
    head = model.get_output_embeddings()
    return {f"{name}.weight": "head" for name, module in modules if module is head} | tables | adapted | experts


def _weight(module: nn.Module) -> nn.Parameter | None:
    return module._parameters.get("weight")


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    text = config.get_text_config(decoder=True)
    mapped = {name: vars(text).get(text.attribute_map.get(name, name)) for name in _STANDARD}
    said = {**text.to_dict(), **{name: value for name, value in mapped.items() if value is not None}}
    return {
        name: value for name, value in said.items() if name not in ("dtype", "torch_dtype")
    }  # the dtype used to build the model


def main() -> None:
    """Answer one request."""
    transformers_logging.set_verbosity_error()
    print(json.dumps(describe(**json.load(sys.stdin)), default=str))


if __name__ == "__main__":
    main()
