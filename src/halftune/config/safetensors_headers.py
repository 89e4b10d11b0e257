"""What the headers of safetensors files say: names, dtypes and shapes of all weights, without reading one."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from pathlib import Path

from halftune.core.errors import ModelError

_FORMATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
# In the files, but not in the text model that is trained: extra prediction heads, towers of other modalities, tables.
_NOT_LOADED = re.compile(r"(^|\.)(mtp|visual|vision_tower|vision_model|audio_tower|multi_modal_projector)\.|inv_freq$")


def read_headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name → (safetensors dtype, shape) over all weight files of a checkpoint; empty where there are none.

    Raises:
        ModelError: a shard that the index names is missing, or a file is cut off or no safetensors file.
    """
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
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        if not file.is_file():
            raise ModelError(f"the shard {file.name} is missing", where=str(folder), remedy="copy or download it again")
        tensors.update(_header(file))
    return tensors


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
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
        return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "the download is incomplete or the file is damaged: fetch it again"
        raise ModelError(f"not a whole safetensors file ({error})", where=str(file), remedy=remedy) from error


def count_parameters(headers: dict[str, tuple[str, tuple[int, ...]]], *, tied: bool) -> int:
    """Elements of the text model's weights; a tied head that was saved beside the embedding counts once."""
    return sum(
        math.prod(shape)
        for name, (_, shape) in headers.items()
        if not _NOT_LOADED.search(name) and not (tied and name.endswith("lm_head.weight"))
    )


def main_format(headers: dict[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """``bf16``, ``fp16`` or ``fp32``: the dtype that most elements have; None where that is none of the three."""
    sizes: Counter[str] = Counter()
    for dtype, shape in headers.values():
        sizes[dtype] += math.prod(shape)
    return _FORMATS.get(sizes.most_common(1)[0][0]) if sizes else None
