"""Saves the result of a run: an adapter or a full model, in the planned dtype."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from halftune.core import alive
from halftune.core.atomic import first_aid, whole_folder
from halftune.core.errors import TrainingError
from halftune.core.formats import Format
from halftune.core.manifest import MANIFEST, seal
from halftune.model.adapters.peft_experts import for_plain_peft
from halftune.model.library_output import no_progress_bars
from halftune.model.loading_readme import write_loading_readme
from halftune.model.prediction_heads import stored_prediction_heads
from halftune.model.save_shards import Named, write_shards
from halftune.model.towers import Towers, text_config_name, towers_of
from halftune.model.tying import sync_tying_config
from halftune.model.weight_range import cast_to_save
from halftune.plan import Plan
from halftune.precision.dtypes import CONFIG_NAMES, kept_names, plain_name, torch_dtype


def save_final(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    folder: Path,
    state: Named | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Save the trained adapter (peft format) or the full model, with its tokenizer, as safetensors.

    All weights are in ``plan.precision.saved``, except those that ``keep_fp32`` or the model's code keeps in fp32. The
    folder is written atomically, with a manifest, and replaces an older one.

    Args:
        model: as ``attach_adapter`` returned it, unwrapped.
        tokenizer: saved with the weights, chat template included.
        plan: gives the dtype.
        folder: e.g. ``RUN/final``.
        state: full tensors with their names in ``model.state_dict()``, as an iterator, if the model is sharded; without
            an adapter each tensor once.
        facts: JSON data for the manifest.

    Raises:
        TrainingError: the folder cannot be written; no partial folder is left.
    """
    saved, keep = plan.precision.saved.value, plan.precision.keep_fp32.value
    try:
        with whole_folder(folder) as partial:
            if isinstance(model, PeftModel):
                _write_adapter(model, saved, keep, partial, None if state is None else dict(state))
            elif isinstance(model, PreTrainedModel):
                write_model(model, saved, keep, partial, state)
            else:
                raise TypeError(f"neither a peft nor a transformers model: {type(model).__name__}")
            save_tokenizer(tokenizer, partial)
            seal(partial, MANIFEST, facts=facts)
    except (OSError, SafetensorError) as error:
        remedy = f"{first_aid(error)} and run the same command again: it resumes from the newest checkpoint"
        what = f"cannot write the result: {error}"
        raise TrainingError(what, where=str(folder), remedy=remedy, code="core.cannot_write") from error


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer with its chat template.

    Raises:
        OSError: it cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error  # the tokenizers package raises Exception for a full disk


def _write_adapter(
    model: PeftModel, saved: Format, keep: Iterable[str], folder: Path, state: Mapping[str, torch.Tensor] | None
) -> None:
    adapter = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    cast = _cast(adapter, saved, kept_names(model, keep))
    tensors = {name: tensor.clone() for name, tensor in cast.items()}  # a tied pair: two tensors
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = for_plain_peft(model)
    config.inference_mode = True
    config.save_pretrained(str(folder))


def _cast_each(named: Named, saved: Format, kept: frozenset[str], towers: Towers | None) -> Named:
    """Tensors of the language model in the format of the saved file, one at a time."""
    for name, tensor in named:
        if towers is None or not towers.own(name):
            yield from _cast({name: tensor}, saved, kept).items()


def write_model(
    model: PreTrainedModel,
    saved: Format,
    keep: Iterable[str],
    folder: Path,
    state: Named | None = None,
) -> None:
    """Save a model's weights in one format, except names that match ``keep``, and its configs.

    The weights are ``state`` if given, else the model's. Towers and tensors for multi-token prediction are copied from
    the base model's files.
    """
    sync_tying_config(model)
    kept, towers, heads = kept_names(model, keep), towers_of(model), stored_prediction_heads(model)
    with no_progress_bars():
        if towers is None and heads is None and state is None:
            cast = _cast(model.state_dict(), saved, kept)
            alive.sign(sum(tensor.nbytes for tensor in cast.values()))
            model.save_pretrained(folder, state_dict=cast)
        else:
            model.save_pretrained(folder, state_dict={})  # configs and code
            cast = _cast_each(_once(model) if state is None else state, saved, kept, towers)
            stored = () if towers is None else towers.read()
            write_shards(model, cast, folder, as_stored=chain(stored, heads or ()))
    write_loading_readme(model, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    _name_dtype(config, CONFIG_NAMES[saved])
    if towers is not None:
        towers.complete(config, text_config_name(model.config), folder)
    config["use_cache"] = True  # off while training only
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _once(model: PreTrainedModel) -> Named:
    """A model's tensors with their names; tied tensors once."""
    done: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in done:
            done.add(id(tensor))
            yield name, tensor


def _cast(state: Mapping[str, torch.Tensor], saved: Format, kept: frozenset[str]) -> dict[str, torch.Tensor]:
    """CPU copies in the saved dtype, ``kept`` in fp32; shared tensors (a tied head) stay shared."""
    dtype = torch_dtype(saved)
    done: dict[tuple[int, torch.Size], torch.Tensor] = {}
    cast = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in done:
            planned = torch.float32 if plain_name(name) in kept else dtype
            target = planned if tensor.is_floating_point() else tensor.dtype
            done[key] = cast_to_save(name, tensor, target)
        cast[name] = done[key]
    return cast


def _name_dtype(config: dict[str, Any], name: str) -> None:
    """Set the dtype in config.json and in its sub-configs (text, vision …) that have one."""
    config.pop("torch_dtype", None)
    config["dtype"] = name
    for part in config.values():
        if isinstance(part, dict) and ("dtype" in part or "torch_dtype" in part):
            _name_dtype(part, name)
