"""Saves the result of a run, an adapter or a full model, in the planned dtype; names the trainable parameters.

A model is written from a stream of tensors, without holding it in memory. A README stands beside weights that plain
transformers would load incorrectly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from halftune.core.atomic import whole_folder, write_error_remedy
from halftune.core.choice import Format
from halftune.core.errors import ModelError, TrainingError
from halftune.core.manifest import MANIFEST, seal
from halftune.core.processes import heartbeat
from halftune.model.adapters.peft_experts import for_plain_peft
from halftune.model.files.architectures import no_progress_bars
from halftune.model.load.runtime_buffers import is_foreign, unsaved_tensors
from halftune.model.load.towers import Towers, stored_prediction_heads, text_config_name, towers_of
from halftune.model.load.weight_range import cast_to_save
from halftune.model.tokenizer.tokenizer import end_of_turn_ids
from halftune.model.tokenizer.vocabulary import sync_tying_config
from halftune.plan import Plan
from halftune.precision.dtypes import CONFIG_NAMES, kept_names, plain_name, torch_dtype


def trainable_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that require gradients, by name, in their own dtype; tied ones once. Not copied."""
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_same(own: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that a checkpoint's weights match the model.

    Raises:
        ModelError: names or shapes differ.
    """
    remedy = "resume with the config of the checkpoint"
    if differing := sorted(own.keys() ^ shapes.keys()):
        what = f"{len(differing)} trained weights are in either the model or the checkpoint only, first {differing[0]}"
        raise ModelError(what, remedy=remedy, code="train.checkpoint_mismatch")
    for name, shape in shapes.items():
        if tuple(own[name].shape) != tuple(shape):
            what = f"{name} is {tuple(shape)} in the checkpoint, {tuple(own[name].shape)} here"
            raise ModelError(what, remedy=remedy, code="train.checkpoint_mismatch")


def load_trainable_state(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the tensors of ``trainable_state`` in place.

    Raises:
        ModelError: names, shapes or dtypes differ.
    """
    own = trainable_state(model)
    check_same(own, {name: tensor.shape for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if tensor.dtype != own[name].dtype:
            what = f"{name} is {tensor.dtype} in the checkpoint, {own[name].dtype} here"
            raise ModelError(
                what,
                remedy="resume with the config of the checkpoint",
                code="train.checkpoint_mismatch",
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


README = "README.md"
_TEXT = """\
# Before you load this model

Its Python code computes {names} in the constructor, and no file contains them. `from_pretrained` of transformers 5
builds the model on the meta device and does not recompute such tensors: they are uninitialised memory, **without an
error or a warning**, and the answers are wrong.

`halftune chat`, `export` and `train` recompute them. Elsewhere, load the model as follows (review the Python files in
this folder first: they are executed):

```python
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

folder = "."  # this one
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=True)  # computes them
for file in sorted(Path(folder).glob("*.safetensors")):
    model.load_state_dict(load_file(file), strict=False, assign=True)  # weights in their own format
model.tie_weights()
model.eval()
```
"""


def write_loading_readme(model: nn.Module, folder: Path) -> None:
    """Write ``README.md`` if plain transformers would load the model incorrectly.

    Raises:
        OSError: the file cannot be written.
    """
    names = list(dict.fromkeys(unsaved_tensors(model))) if is_foreign(model) else []
    if names:
        shown = ", ".join(f"`{name}`" for name in names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
        (folder / README).write_text(_TEXT.format(names=shown), encoding="utf-8")


_UP = ".lora_B."
FILE_BYTES = 5 * 10**9  # maximum shard size, as in transformers
_LAYER = re.compile(r"^.*?\.\d+(?=\.)")
_INDEX = "model.safetensors.index.json"

Named = Iterable[tuple[str, torch.Tensor]]


def write_shards(
    model: PreTrainedModel, tensors: Named, folder: Path, limit: int = FILE_BYTES, as_stored: Named = ()
) -> None:
    """Write tensors in shards of at most ``limit`` bytes, with an index if there are several.

    Holds one shard and one layer in memory; a layer, because merged weights (experts) are split again as transformers
    does.

    Args:
        model: defines the names in checkpoints.
        tensors: (name in ``model.state_dict()``, tensor), grouped by layer.
        folder: an existing folder.
        limit: bytes; a larger tensor gets its own shard.
        as_stored: further tensors, with their names in a checkpoint.

    Raises:
        OSError, SafetensorError: a file cannot be written.
    """
    for old in (*folder.glob("model*.safetensors"), folder / _INDEX):
        old.unlink(missing_ok=True)
    files: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    size = total = 0
    for name, tensor in chain(_as_stored(model, tensors), as_stored):
        if held and size + tensor.nbytes > limit:
            files.append(_close(held, folder, len(files)))
            size = 0
        held[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    files.append(_close(held, folder, len(files)))
    if len(files) == 1:
        _part(folder, 0).rename(folder / "model.safetensors")
        return
    places = {}
    for number, names in enumerate(files):
        path = folder / f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        _part(folder, number).rename(path)
        places |= dict.fromkeys(names, path.name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _as_stored(model: PreTrainedModel, tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert tensors to checkpoint names and shapes, layer by layer."""
    layer: dict[str, torch.Tensor] = {}
    current = None
    for name, tensor in tensors:
        found = _LAYER.match(name)
        of = found.group() if found else None
        if layer and of != current:
            yield from revert_weight_conversion(model, layer).items()
            layer = {}
        current = of
        layer[name] = tensor
    yield from revert_weight_conversion(model, layer).items()


def _close(held: dict[str, torch.Tensor], folder: Path, number: int) -> list[str]:
    """Write a shard, free its tensors, and return their names."""
    heartbeat.beat(sum(tensor.nbytes for tensor in held.values()))
    # Slices of one tensor share memory, which safetensors refuses.
    save_file({name: tensor.clone() if _cut(tensor) else tensor for name, tensor in held.items()},
              _part(folder, number), metadata={"format": "pt"})  # fmt: skip
    names = list(held)
    held.clear()
    return names


def _cut(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.nbytes


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}"


def save_final(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    folder: Path,
    state: Named | None = None,
    facts: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> list[str]:
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
        files: name → content of further text files.

    Returns:
        Names of the modules whose LoRA update is zero, as before training.

    Raises:
        TrainingError: the folder cannot be written, or trained weights would be missing there; no partial folder is
            left.
    """
    unmoved: list[str] = []
    saved, keep = plan.precision.saved.value, plan.precision.keep_fp32.value
    try:
        with whole_folder(folder) as partial:
            if isinstance(model, PeftModel):
                unmoved = _write_adapter(model, saved, keep, partial, None if state is None else dict(state))
            elif isinstance(model, PreTrainedModel):
                write_model(model, saved, keep, partial, state)
            else:
                raise TypeError(f"neither a peft nor a transformers model: {type(model).__name__}")
            save_tokenizer(tokenizer, partial)
            for name, content in (files or {}).items():
                (partial / name).write_text(content, encoding="utf-8")
            seal(partial, MANIFEST, facts=facts)
    except (OSError, SafetensorError) as error:
        remedy = f"{write_error_remedy(error)} and run the same command again: it resumes from the newest checkpoint"
        what = f"cannot write the result: {error}"
        raise TrainingError(what, where=str(folder), remedy=remedy, code="core.cannot_write") from error
    return unmoved


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer with its chat template, beside a model that is saved already.

    The model's generation config lists the tokens that end an answer, so that other programs stop there too.

    Raises:
        OSError: it cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error  # the tokenizers package raises Exception for a full disk
    path = folder / "generation_config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        listed = config.get("eos_token_id")
        known = listed if isinstance(listed, list) else [listed]
        with suppress(ModelError):  # a template may refuse a single question
            ends = [*known, *(token for token in end_of_turn_ids(tokenizer) if token not in known)]
            config["eos_token_id"] = [token for token in ends if token is not None]
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_adapter(
    model: PeftModel, saved: Format, keep: Iterable[str], folder: Path, state: Mapping[str, torch.Tensor] | None
) -> list[str]:
    # peft's default asks the hub whether the base model's vocabulary differs; modules_to_save says what is trained
    adapter = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    # refuse to save fewer weights than are trained: peft selects them by their names
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    if (found := sum(one.numel() for one in adapter.values())) < trained:
        what = f"the saved adapter would have {found:,} of {trained:,} trained weights"
        remedy = "resume from the newest checkpoint, which has all of them, with another adapter.target_modules"
        raise TrainingError(what, where=str(folder), remedy=remedy, code="train.adapter_incomplete")
    unmoved = [name.partition(_UP)[0] for name, tensor in adapter.items() if _UP in name and not tensor.any()]
    config = for_plain_peft(model)
    if first := vars(model).get("initial_adapter"):
        from halftune.model.adapters.initial import convert  # few adapters begin with a part of the base

        adapter = convert(adapter, first, config)
    cast = _cast(adapter, saved, kept_names(model, keep))
    tensors = {name: tensor.clone() for name, tensor in cast.items()}  # a tied pair: two tensors
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.inference_mode = True
    config.save_pretrained(str(folder))
    return unmoved


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
    limit: int = FILE_BYTES,
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
            heartbeat.beat(sum(tensor.nbytes for tensor in cast.values()))
            model.save_pretrained(folder, state_dict=cast)
        else:
            model.save_pretrained(folder, state_dict={})  # configs and code
            cast = _cast_each(_once(model) if state is None else state, saved, kept, towers)
            stored = () if towers is None else towers.read()
            write_shards(model, cast, folder, limit, as_stored=chain(stored, heads or ()))
    write_loading_readme(model, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    _name_dtype(config, CONFIG_NAMES[saved])
    config["use_cache"] = True  # off while training only
    if towers is not None:
        config = towers.complete(config, text_config_name(model.config), folder)
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
