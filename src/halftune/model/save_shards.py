"""Saves a model from a stream of tensors, without holding it in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from halftune.core import alive

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
    alive.sign(sum(tensor.nbytes for tensor in held.values()))
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
