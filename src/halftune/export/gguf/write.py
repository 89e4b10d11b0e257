"""Writes a GGUF file, one tensor in memory, and compares it with the folder that it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from halftune.config.sections.model import TokensSection
from halftune.core.errors import ModelError
from halftune.core.processes import heartbeat
from halftune.export.gguf.family import Family, family_of, metadata, rope_factors
from halftune.export.gguf.tensors import all_tensors, names, to_gguf, type_of
from halftune.export.gguf.unsupported import unsupported
from halftune.export.gguf.vocabulary import Vocabulary, read_vocabulary, stops_of
from halftune.model.load.towers import as_stored
from halftune.plan.weights.added_tokens import rows_for

ROPE_FACTORS = "rope_freqs.weight"
FILE_TYPES = {
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}


@dataclass(frozen=True)
class Source:
    """A Hugging Face folder, as it is written to GGUF.

    Attributes:
        folder: with config, weights and tokenizer.
        config: of the model.
        family: its row in gguf.yaml.
        vocabulary: of the tokenizer.
    """

    folder: Path
    config: PretrainedConfig
    family: Family
    vocabulary: Vocabulary


def open_source(folder: Path, tokenizer: PreTrainedTokenizerBase, tokens: TokensSection | None = None) -> Source:
    """Read config and tokenizer of a folder.

    Args:
        folder: with config.json.
        tokenizer: of the result.
        tokens: ``model.tokens`` of a run whose base this is: the embedding grows when it is merged.

    Raises:
        ModelError: llama.cpp does not know such a model or tokenizer.
    """
    config = AutoConfig.from_pretrained(folder)
    family = family_of(config, str(folder))
    if tokens is not None and tokens.add:
        config.vocab_size = rows_for(config.vocab_size, len(tokenizer), tokens)
    vocabulary = read_vocabulary(tokenizer, config.vocab_size, stops_of(folder))
    if len(vocabulary.tokens) > config.vocab_size:
        raise unsupported(f"{len(vocabulary.tokens)} tokens, and {config.vocab_size} embeddings", str(folder))
    return Source(folder, config, family, vocabulary)


def write_gguf(source: Source, path: Path, kind: str, name: str) -> None:
    """Write the file.

    Args:
        source: the model.
        path: of the file.
        kind: ``f16``, ``bf16`` or ``q8_0``.
        name: of the model in the file.

    Raises:
        ModelError: a tensor has no name in llama.cpp, or a weight exceeds the range of f16.
        OSError: the file cannot be written.
    """
    writer = gguf.GGUFWriter(path, source.family.architecture)
    _write_metadata(writer, source, kind, name)
    shapes = _shapes(source)
    for one, shape in shapes.items():
        stored = type_of(shape, kind)
        bytes_shape = gguf.quant_shape_to_byte_shape(shape, stored)
        writer.add_tensor_info(one, bytes_shape, np.dtype(np.uint8), int(np.prod(bytes_shape)), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for one, tensor in _tensors(source):
        stored = type_of(tensor, kind)
        heartbeat.beat(tensor.nbytes)
        writer.write_tensor_data(_packed(one, tensor, stored))
    writer.close()


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """The tensors' names and shapes in the order of ``_tensors``, from the files' headers."""
    from safetensors import safe_open

    from halftune.config.facts.safetensors_headers import weight_files

    mapped = names(source.folder, source.family, source.config)
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(source.folder):
        with safe_open(file, "pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    shapes = {mapped[name]: found[name] for name in mapped}
    factors = rope_factors(source.config)
    return shapes if factors is None else {**shapes, ROPE_FACTORS: tuple(factors.shape)}


def _tensors(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    yield from all_tensors(source.folder, source.family, source.config)
    factors = rope_factors(source.config)
    if factors is not None:
        yield ROPE_FACTORS, factors


def _packed(name: str, tensor: torch.Tensor, stored: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    if stored is gguf.GGMLQuantizationType.F16 and float(tensor.abs().max()) > torch.finfo(torch.float16).max:
        what = f"{name} exceeds the f16 range"
        raise ModelError(what, remedy="--gguf-type bf16 or q8_0", code="export.beyond_range")
    return gguf.quants.quantize(tensor.contiguous().numpy(), stored)


def _write_metadata(writer: gguf.GGUFWriter, source: Source, kind: str, name: str) -> None:
    words = source.vocabulary
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in metadata(source.family, source.config).items():
        _add(writer, f"{source.family.architecture}.{key}", value)
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    if words.model == "gpt2":
        writer.add_token_merges(words.merges)
    else:
        writer.add_token_scores(words.scores)
        writer.add_add_space_prefix(words.space_prefix)
    for one, index in words.ids.items():
        writer.add_uint32(f"tokenizer.ggml.{one}_token_id", index)
    writer.add_add_bos_token(words.add_bos)
    writer.add_add_eos_token(words.add_eos)
    if words.template is not None:
        writer.add_chat_template(words.template)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def compare(source: Source, path: Path, kind: str) -> tuple[int, float]:
    """Read a GGUF file back and compare it with the folder: every tensor, the vocabulary, merges, template, stops.

    Returns:
        the number of tensors, and their largest relative error (of the norms).

    Raises:
        ModelError: the file differs from the folder by more than the rounding of its types.
    """
    reader = gguf.GGUFReader(path)
    fields = {key: one.contents() for key, one in reader.fields.items()}
    for key, value in _fields(source.vocabulary).items():
        if fields.get(key) != value:
            raise _differs(path, key)
    packed = {one.name: one for one in reader.tensors}
    mapped = names(source.folder, source.family, source.config)
    factors = [] if rope_factors(source.config) is None else [ROPE_FACTORS]
    if packed.keys() != {*mapped.values(), *factors}:
        raise _differs(path, "the list of tensors")
    worst = 0.0
    for name, tensor in as_stored(source.folder, mapped):
        one = packed[mapped[name]]
        read = torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).reshape(tensor.shape).copy())
        wanted, error = tensor.float(), 0.0
        found = to_gguf(name, read, source.family, source.config, undo=True)
        if wanted.any():
            error = float((found - wanted).norm() / wanted.norm())
        bound = _rounding(wanted, one.tensor_type, shifted=source.family.plus_one and name.endswith("norm.weight"))
        if not bool(((found - wanted).abs() <= bound).all()):
            raise _differs(path, name)
        worst = max(worst, error)
    return len(packed), worst


def _rounding(wanted: torch.Tensor, stored: gguf.GGMLQuantizationType, *, shifted: bool) -> torch.Tensor:
    """The largest error of each element that a type explains."""
    size = wanted.abs()
    if stored is gguf.GGMLQuantizationType.Q8_0:  # 127 steps for the largest of 32, the step in f16, perhaps subnormal
        most = size.reshape(-1, 32).amax(1, keepdim=True).expand(-1, 32).reshape(wanted.shape)
        return most / 127 * 0.5 + most * 2**-11 + 127 * 2**-25
    if stored is gguf.GGMLQuantizationType.F32:
        return (1 + size) * 2**-23 if shifted else torch.zeros_like(size)
    if stored is gguf.GGMLQuantizationType.BF16:
        return size * 2**-8
    return size * 2**-11 + 2**-25


def _fields(words: Vocabulary) -> dict[str, Any]:
    """The keys of a vocabulary in a file."""
    found: dict[str, Any] = {
        "tokenizer.ggml.model": words.model,
        "tokenizer.ggml.pre": words.pre,
        "tokenizer.ggml.tokens": words.tokens,
        "tokenizer.ggml.token_type": words.types,
        "tokenizer.ggml.add_bos_token": words.add_bos,
        "tokenizer.ggml.add_eos_token": words.add_eos,
        "tokenizer.chat_template": words.template,
        **{f"tokenizer.ggml.{name}_token_id": index for name, index in words.ids.items()},
    }
    if words.model == "gpt2":
        return {**found, "tokenizer.ggml.merges": words.merges}
    return {**found, "tokenizer.ggml.scores": words.scores, "tokenizer.ggml.add_space_prefix": words.space_prefix}


def _differs(path: Path, what: str) -> ModelError:
    return ModelError(
        f"{what} in the file differs from the folder",
        where=str(path),
        remedy="export again; report it if it happens twice",
        code="export.gguf_differs",
    )
