"""Checkpoints that hold a language model with its towers beside models that are not trained, one row each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halftune.config.facts.safetensors_headers import read_headers


@dataclass(frozen=True)
class Wrapper:
    """A model type around the one that is trained.

    Attributes:
        part: name of the trained model's sub-config.
        prefix: of its tensors in the files.
        kind: its model type.
        files: further files of the models that are left out.
    """

    part: str
    prefix: str
    kind: str
    files: tuple[str, ...] = ()


WRAPPERS = {
    "qwen2_5_omni": Wrapper("thinker_config", "thinker.", "qwen2_5_omni_thinker", ("spk_dict.pt",)),
    "qwen3_omni_moe": Wrapper("thinker_config", "thinker.", "qwen3_omni_moe_thinker"),
}


def wrapper_of(raw: dict[str, Any]) -> Wrapper | None:
    """The row of a parsed config.json; None for most models."""
    row = WRAPPERS.get(str(raw.get("model_type")))
    return row if row is not None and isinstance(raw.get(row.part), dict) else None


def wrapper_in(folder: Path) -> Wrapper | None:
    """The row of a checkpoint's config.json."""
    return wrapper_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def tensors_around(folder: Path) -> tuple[str, ...]:
    """Names of the tensors of a checkpoint's other models; empty for most models."""
    if (row := wrapper_in(folder)) is None:
        return ()
    return tuple(sorted(name for name in read_headers(folder) if not name.startswith(row.prefix)))


def unwrapped(raw: dict[str, Any]) -> dict[str, Any]:
    """The parsed config.json, or the part of it that describes the trained model."""
    row = wrapper_of(raw)
    if row is None:
        return raw
    around = {key: raw[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in raw}
    return {**around, **raw[row.part], "model_type": row.kind}
