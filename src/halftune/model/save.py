"""Writes the result of a run: an adapter or a full model, in the planned dtype, which config.json names too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
from halftune.model.adapters.mixtures import for_plain_peft
from halftune.model.card import write_card
from halftune.model.quiet import quiet
from halftune.model.save_pieces import Named, write_pieces
from halftune.model.towers import text_config_name, towers_of
from halftune.model.tying import name_tying
from halftune.model.weight_range import cast_to_save
from halftune.plan import Plan
from halftune.precision.dtypes import CONFIG_NAMES, kept_names, plain_name, torch_dtype


def save_final(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    folder: Path,
    state: Named | None = None,
) -> None:
    """Writes the trained adapter (peft's format) or the whole model, with its tokenizer; safetensors only.

    Everything is in ``plan.precision.saved``, but for what ``keep_fp32`` names or the model's own code keeps in fp32.
    The folder appears when it is whole, with a manifest of its files, and replaces an older one.

    Args:
        model: as ``attach_adapter`` returned it, unwrapped.
        tokenizer: written beside the weights, chat template included.
        plan: gives the dtype.
        folder: e.g. ``RUN/final``.
        state: whole tensors with their names in ``model.state_dict()``, one after the other, where the model holds
            a share of them only; of a model without adapter each tensor once.

    Raises:
        TrainingError: the folder cannot be written; nothing half-written is left.
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
            seal(partial, MANIFEST)
    except (OSError, SafetensorError) as error:
        remedy = f"{first_aid(error)} and run the same command again: it goes on from the newest checkpoint"
        raise TrainingError(f"cannot write the result: {error}", where=str(folder), remedy=remedy) from error


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a tokenizer with its chat template.

    Raises:
        OSError: it cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error  # the tokenizers package knows no other class for a full disk


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


def write_model(
    model: PreTrainedModel,
    saved: Format,
    keep: Iterable[str],
    folder: Path,
    state: Named | None = None,
) -> None:
    """Writes a model's weights and configs in one format, ``keep`` (patterns of names) apart, into ``folder``.

    The weights are ``state`` where it is given, else the model's own. Towers are as in the files of the base model.
    """
    name_tying(model)
    kept, towers = kept_names(model, keep), towers_of(model)
    with quiet():
        if towers is not None:
            model.save_pretrained(folder, state_dict={})
            named = _once(model) if state is None else state
            language = (dict([item]) for item in named if not towers.own(item[0]))
            text = (one for item in language for one in _cast(item, saved, kept).items())
            write_pieces(model, text, folder, as_stored=towers.read())
        elif state is None:
            cast = _cast(model.state_dict(), saved, kept)
            alive.sign(sum(tensor.nbytes for tensor in cast.values()))
            model.save_pretrained(folder, state_dict=cast)
        else:
            model.save_pretrained(folder, state_dict={})  # configs and code
            write_pieces(model, (one for item in state for one in _cast(dict([item]), saved, kept).items()), folder)
    write_card(model, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    _name_dtype(config, CONFIG_NAMES[saved])
    if towers is not None:
        towers.complete(config, text_config_name(model.config), folder)
    config["use_cache"] = True  # off while training only
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _once(model: PreTrainedModel) -> Named:
    """A model's tensors with their names, tied ones under the first."""
    done: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in done:
            done.add(id(tensor))
            yield name, tensor


def _cast(state: Mapping[str, torch.Tensor], saved: Format, kept: frozenset[str]) -> dict[str, torch.Tensor]:
    """CPU copies in the saved dtype, ``kept`` in fp32; tensors that share memory (a tied head) go on sharing it."""
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
    """Writes the dtype into config.json and into those of its parts (text, vision …) that name one."""
    config.pop("torch_dtype", None)
    config["dtype"] = name
    for part in config.values():
        if isinstance(part, dict) and ("dtype" in part or "torch_dtype" in part):
            _name_dtype(part, name)
