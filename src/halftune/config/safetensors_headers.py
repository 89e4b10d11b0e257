"""What the headers of safetensors files say: names, dtypes and shapes of all weights, without reading one."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from halftune.core.errors import ModelError

_FORMATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
# Weights in these are quantised: numbers that mean nothing without scales, and without a config that says which.
_QUANTISED = re.compile(r"F8|F6_|F4|I8|I4")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings?|embed_in|embeddings?|tok_embeddings)\.weight$")
_SAMPLE = 1 << 16  # bytes compared at the beginning, in the middle and at the end
# In the files, but not in the text model that is trained: extra prediction heads, towers of other modalities, tables.
_NOT_LOADED = re.compile(r"(^|\.)(mtp|visual|vision_tower|vision_model|audio_tower|multi_modal_projector)\.|inv_freq$")


def read_headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name → (safetensors dtype, shape) over all weight files of a checkpoint; empty where there are none.

    Raises:
        ModelError: a shard that the index names is missing, or a file is cut off or no safetensors file.
    """
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, (_, _, entry) in _entries(folder).items()}


def _entries(folder: Path) -> dict[str, tuple[Path, int, dict[str, Any]]]:
    """Tensor name → (file, where its data begin, header entry)."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError("the index of the weights cannot be read", where=str(index)) from error
        files = [folder / name for name in names]
    else:
        files = [single] if single.is_file() else []
    tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for file in files:
        if not file.is_file():
            raise ModelError(f"the shard {file.name} is missing", where=str(folder), remedy="copy or download it again")
        tensors.update(_header(file))
    return tensors


def _header(file: Path) -> dict[str, tuple[Path, int, dict[str, Any]]]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("header longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        size = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != file.stat().st_size:
            raise ValueError("cut off")
        for entry in header.values():
            _ = entry["dtype"], tuple(entry["shape"])
        return {name: (file, 8 + length + entry["data_offsets"][0], entry) for name, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "the download is incomplete or the file is damaged: fetch it again"
        raise ModelError(f"not a whole safetensors file ({error})", where=str(file), remedy=remedy) from error


def has_head_of_its_own(folder: Path) -> bool:
    """Whether the files hold a head whose numbers are not the embedding's, so that it is kept whatever the config says.

    Only samples of both are read. False where there is no head, or no embedding beside it.
    """
    entries = _entries(folder)
    heads, embeddings = ([e for name, e in entries.items() if kind.search(name)] for kind in (_HEAD, _EMBEDDING))
    if len(heads) != 1:
        return False
    same_shape = [entry for entry in embeddings if entry[2]["shape"] == heads[0][2]["shape"]]
    return bool(same_shape) and all(_sampled(entry) != _sampled(heads[0]) for entry in same_shape)


def _sampled(entry: tuple[Path, int, dict[str, Any]]) -> tuple[str, list[bytes]]:
    """Dtype and some bytes of a tensor."""
    file, start, header = entry
    size = header["data_offsets"][1] - header["data_offsets"][0]
    parts = []
    with file.open("rb") as stream:
        for offset in (0, size // 2, max(size - _SAMPLE, 0)):
            stream.seek(start + offset)
            parts.append(stream.read(min(_SAMPLE, size - offset)))
    return header["dtype"], parts


def quantised_weight(headers: dict[str, tuple[str, tuple[int, ...]]]) -> tuple[str, str] | None:
    """(name, dtype) of the first matrix that is stored in a quantised format; None where there is none."""
    for name, (dtype, shape) in headers.items():
        if len(shape) > 1 and name.endswith("weight") and _QUANTISED.match(dtype):
            return name, dtype
    return None


def count_parameters(headers: dict[str, tuple[str, tuple[int, ...]]], *, tied: bool) -> int:
    """Elements of the text model's weights; a tied head that was saved beside the embedding counts once."""
    return sum(
        math.prod(shape)
        for name, (_, shape) in headers.items()
        if not _NOT_LOADED.search(name) and not (tied and name.endswith("lm_head.weight"))
    )


def main_format(headers: dict[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """``bf16``, ``fp16``, ``fp32`` or ``fp64``: the dtype that most elements have; None where it is another."""
    sizes: Counter[str] = Counter()
    for dtype, shape in headers.values():
        sizes[dtype] += math.prod(shape)
    return _FORMATS.get(sizes.most_common(1)[0][0]) if sizes else None
