"""A model's tensors with llama.cpp's names and in its layout, one at a time; and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from transformers import PretrainedConfig

from halftune.config.facts.safetensors_headers import read_headers
from halftune.export.gguf.family import Family
from halftune.export.gguf.unsupported import unsupported
from halftune.model.load.towers import as_stored


def names(folder: Path, family: Family, config: PretrainedConfig) -> dict[str, str]:
    """Map the names of a folder's tensors to llama.cpp's; a tied output layer is left out.

    Raises:
        ModelError: a tensor has no name in llama.cpp.
    """
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family.architecture]
    known = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found: dict[str, str] = {}
    for name in read_headers(folder):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        new = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise unsupported(f"{name} has no name in llama.cpp's {family.architecture}", str(folder))
        found[name] = new
    return found


def to_gguf(
    name: str, tensor: torch.Tensor, family: Family, config: PretrainedConfig, *, undo: bool = False
) -> torch.Tensor:
    """Return a tensor as llama.cpp lays it out.

    Args:
        name: in the folder.
        tensor: in fp32.
        family: of the model.
        config: of the model.
        undo: return a tensor of llama.cpp as the folder has it.
    """
    if family.plus_one and name.endswith("norm.weight"):
        return tensor - 1 if undo else tensor + 1
    if heads := _permuted_heads(name, family, config):
        half = tensor.shape[0] // heads // 2
        sizes = (half, 2) if undo else (2, half)
        return tensor.reshape(heads, *sizes, -1).transpose(1, 2).reshape(tensor.shape)
    return tensor


def _permuted_heads(name: str, family: Family, config: PretrainedConfig) -> int:
    layer = name.rpartition(".")[0].rpartition(".")[2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(layer, 0) if family.permuted else 0


def type_of(tensor: torch.Tensor | tuple[int, ...], asked: str) -> gguf.GGMLQuantizationType:
    """The type of a tensor in the file: vectors stay fp32; rows that are no multiple of 32 stay f16 in q8_0.

    Args:
        tensor: or its shape.
        asked: ``f16``, ``bf16`` or ``q8_0``.
    """
    shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else tensor
    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    if asked == "q8_0" and shape[-1] % 32:
        return gguf.GGMLQuantizationType.F16
    return gguf.GGMLQuantizationType[asked.upper()]


def all_tensors(folder: Path, family: Family, config: PretrainedConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the folder's tensors in fp32, with llama.cpp's names and layout."""
    mapped = names(folder, family, config)
    for name, tensor in as_stored(folder, mapped):
        yield mapped[name], to_gguf(name, tensor.float(), family, config)
