"""Reads names, dtypes and shapes of all weights from the headers of safetensors files."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from halftune.core.errors import ModelError
from halftune.core.files import MOST_JSON, read_limited

_FORMATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I8": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8, "BOOL": 1}
# Dtypes of quantised weights, which need scales and a config that names the method.
_QUANTISED = re.compile(r"F8|F6_|F4|[IU]\d|BOOL")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings?|embed_in|embeddings?|tok_embeddings)\.weight$")
_POINTER = b"version https://git-lfs"
_SAMPLE = 1 << 16  # bytes compared at the beginning, in the middle and at the end
# In the files, but not in the trained text model: extra prediction heads, towers, tables.
_NOT_LOADED = re.compile(
    r"(^|\.)(mtp|visual|vision_tower|vision_model|audio_tower|multi_modal_projector|mlp_AR|talker|token2wav|code2wav)\.|inv_freq$"
)


_NO_TOWER = re.compile(r"(^|\.)mtp\.|inv_freq$")
# The language model and head in the files of a model with towers; no other tensors are trained.
_LANGUAGE = re.compile(r"(^|\.)(language_model|text_model)\.|(^|\.)lm_head\.")

Headers = dict[str, tuple[str, tuple[int, ...]]]


def read_headers(folder: Path) -> Headers:
    """Return tensor name → (safetensors dtype, shape) of all weight files of a checkpoint; empty if there are none.

    Raises:
        ModelError: a shard is missing, or a file is truncated or not a safetensors file.
    """
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, (_, _, entry) in _entries(folder).items()}


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers reads: the single file if present, else the shards of the index.

    Raises:
        ModelError: the index cannot be read, or names missing or other files.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    shards = _shards(index) if index.is_file() else []
    return [single] if single.is_file() else shards


def damaged(what: str, where: Path | str) -> ModelError:
    """Return the error for a corrupt file of a checkpoint."""
    remedy = "download the file again, or restore it"
    return ModelError(what, where=str(where), remedy=remedy, code="core.file_damaged")


def _entries(folder: Path) -> dict[str, tuple[Path, int, dict[str, Any]]]:
    """Tensor name → (file, offset of its data, header entry)."""
    tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for file in weight_files(folder):
        tensors.update(_header(file))
    return tensors


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(read_limited(index).decode())["weight_map"].values()))
        files = [index.parent / name for name in names]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        reason = f": {error.strerror}" if isinstance(error, OSError) else ""
        raise damaged(f"cannot read the index of the weights{reason}", index) from error
    for name in names:
        _check_shard(name, index)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        what = f"{len(missing)} of {len(files)} weight files are missing, first {missing[0]}"
        raise ModelError(what, where=str(index.parent), remedy="download the model again", code="model.weights_missing")
    return files


def _check_shard(name: str, index: Path) -> None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        what = f"the index contains {name}, outside the model's folder"
        remedy = "download the model again from a source you trust"
        raise ModelError(what, where=str(index), remedy=remedy, code="model.index_outside_folder")
    if not name.endswith(".safetensors"):
        what = f"the index contains {name}, which is not safetensors and may be a pickle that executes code"
        raise ModelError(what, where=str(index), remedy="use a safetensors checkpoint", code="model.pickle_refused")


def read_header(file: Path) -> Headers:
    """Return tensor name → (safetensors dtype, shape) of one file.

    Raises:
        ModelError: it is truncated, or not a safetensors file.
    """
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, (_, _, entry) in _header(file).items()}


def places(file: Path) -> list[tuple[int, int]]:
    """Return offset and size in bytes of each tensor of a file, in the file's order.

    Raises:
        ModelError: as :func:`read_header`.
    """
    offsets = ((start, entry["data_offsets"]) for _, start, entry in _header(file).values())
    return sorted((start, end - begin) for start, (begin, end) in offsets)


def _header(file: Path) -> dict[str, tuple[Path, int, dict[str, Any]]]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size:
                raise ValueError("its header says that it is longer than the file")
            if length > MOST_JSON:
                raise ValueError(f"the header has {length:,} bytes; the maximum is {MOST_JSON:,}")
            header = json.loads(stream.read(length), object_pairs_hook=_once)
        header.pop("__metadata__", None)
        whole = 8 + length + _end(header)
        if whole != size:
            raise ValueError(f"expected {whole:,} bytes by the header, got {size:,}")
        return {name: (file, 8 + length + entry["data_offsets"][0], entry) for name, entry in header.items()}
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise ModelError(what, where=str(file), remedy="change its permissions", code="core.unreadable") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = "shorter than a header" if isinstance(error, struct.error) else str(error)
        remedy = "download the file again, or restore it"
        if _is_pointer(file):
            reason, remedy = "a git-lfs pointer instead of the weights", "run `git lfs pull` in the folder"
        what = f"corrupt or truncated safetensors file: {reason}"
        raise ModelError(what, where=str(file), remedy=remedy, code="core.file_damaged") from error


def _end(header: dict[str, Any]) -> int:
    """Bytes of all tensors, which lie one behind the other.

    Raises:
        ValueError, KeyError, TypeError: they do not, or an entry is wrong.
    """
    end = 0
    for begin, after, name in sorted(_check_entry(name, entry) for name, entry in header.items()):
        if begin != end:
            raise ValueError(f"{name} begins at byte {begin:,} instead of {end:,}, where the tensor before it ends")
        end = after
    return end


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(_POINTER)) == _POINTER


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; readers differ in which of two values of one name they take.

    Raises:
        ValueError: a name is there twice.
    """
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"{twice[0]} is there twice")
    return dict(pairs)


def _check_entry(name: str, entry: dict[str, Any]) -> tuple[int, int, str]:
    """Begin and end of a tensor's bytes, and its name; checks that dtype, shape and size match.

    Raises:
        ValueError, KeyError, TypeError: they do not.
    """
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, start, end]
    if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{name} has no dtype, shape or offsets")
    if dtype in _BYTES and end - start != _BYTES[dtype] * math.prod(shape):
        raise ValueError(f"the size of {name} does not match its shape")
    return start, end, name


def has_head_of_its_own(folder: Path) -> bool:
    """Whether the files contain a head that differs from the embedding, and so is not tied, whatever the config says.

    Only samples of both are read. False where there is no head, or no embedding beside it.
    """
    entries = _entries(folder)
    heads, embeddings = ([e for name, e in entries.items() if kind.search(name)] for kind in (_HEAD, _EMBEDDING))
    if len(heads) != 1:
        return False
    same_shape = [entry for entry in embeddings if entry[2]["shape"] == heads[0][2]["shape"]]
    return bool(same_shape) and all(_sampled(entry) != _sampled(heads[0]) for entry in same_shape)


def _sampled(entry: tuple[Path, int, dict[str, Any]]) -> tuple[str, list[bytes]]:
    """Dtype and sampled bytes of a tensor."""
    file, start, header = entry
    size = header["data_offsets"][1] - header["data_offsets"][0]
    parts = []
    with file.open("rb") as stream:
        for offset in (0, size // 2, max(size - _SAMPLE, 0)):
            stream.seek(start + offset)
            parts.append(stream.read(min(_SAMPLE, size - offset)))
    return header["dtype"], parts


def quantised_weight(headers: Headers) -> tuple[str, str] | None:
    """Return (name, dtype) of the first quantised matrix; None if there is none."""
    for name, (dtype, shape) in headers.items():
        if len(shape) > 1 and name.endswith("weight") and _QUANTISED.match(dtype):
            return name, dtype
    return None


def split_towers(headers: Headers) -> tuple[Headers, Headers]:
    """Split the headers of a multimodal checkpoint into those of its language model and of its towers.

    Files of an older format have no name for the language model: there the towers' usual names decide.
    """
    text = {name: entry for name, entry in headers.items() if _LANGUAGE.search(name)}
    if all("lm_head" in name for name in text):
        text = {name: entry for name, entry in headers.items() if not _NOT_LOADED.search(name)}
    others = headers.items() - text.items()
    return text, {name: entry for name, entry in others if not _NO_TOWER.search(name)}


def count_parameters(headers: Headers, *, tied: bool) -> int:
    """Return the number of elements of the text model's weights; a tied head counts once."""
    return sum(
        math.prod(shape)
        for name, (_, shape) in headers.items()
        if not _NOT_LOADED.search(name) and not (tied and name.endswith("lm_head.weight"))
    )


def main_format(headers: Headers) -> str | None:
    """Return the dtype of most elements: ``bf16``, ``fp16``, ``fp32`` or ``fp64``; None if it is another."""
    sizes: Counter[str] = Counter()
    for dtype, shape in headers.values():
        sizes[dtype] += math.prod(shape)
    return _FORMATS.get(sizes.most_common(1)[0][0]) if sizes else None


def stored_formats(headers: dict[str, tuple[str, tuple[int, ...]]] | Path) -> dict[str, str]:
    """Return tensor name → ``bf16 | fp16 | fp32 | fp64`` of the text model's weights with these dtypes.

    Args:
        headers: as ``read_headers`` gives them, or the folder to read them of.
    """
    found = read_headers(headers) if isinstance(headers, Path) else headers
    return {
        name: _FORMATS[dtype]
        for name, (dtype, _) in found.items()
        if dtype in _FORMATS and not _NOT_LOADED.search(name)
    }
