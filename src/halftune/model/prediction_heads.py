"""Copies weights for multi-token prediction, which transformers' classes ignore, from the base to the result."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from halftune.config.facts.missing_weights import prediction_heads
from halftune.config.facts.safetensors_headers import read_headers, weight_files
from halftune.core.log import get_logger

log = get_logger(__name__)

_OF: weakref.WeakKeyDictionary[nn.Module, tuple[Path, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def record_prediction_heads(model: PreTrainedModel, folder: Path, unexpected: Iterable[str]) -> None:
    """Record the tensors for multi-token prediction that the model does not load.

    Args:
        model: as loaded by ``from_pretrained``.
        folder: of its checkpoint.
        unexpected: unexpected tensors, without those that its class ignores.
    """
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or ()) or r"(?!)")
    layers: int = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", sys.maxsize)
    found, unexpected = prediction_heads(read_headers(folder), layers), set(unexpected)
    if names := tuple(name for name in found if name in unexpected or ignored.search(name)):
        _OF[model] = (folder, names)
        log.info(
            "copying %d tensors for multi-token prediction unchanged, first %s, from %s", len(names), names[0], folder
        )


def stored_prediction_heads(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]] | None:
    """The recorded tensors from the files, as an iterator; None if there are none.

    Raises:
        OSError, SafetensorError: while iterating, a file is missing or was replaced.
    """
    return as_stored(*_OF[model]) if model in _OF else None


def as_stored(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over tensors of a checkpoint's files.

    Raises:
        OSError, SafetensorError: a file cannot be read, or a tensor is missing.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in weight_files(folder)]
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118, not a mapping
        for name in names:
            if name not in places:
                raise OSError(f"tensor {name} is missing from the files of {folder}")
            yield name, places[name].get_tensor(name)
