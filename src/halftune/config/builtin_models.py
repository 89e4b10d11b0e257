"""The builtin models' ``config.json``, from ``builtin_models.yaml``.

``halftune.model.files.builtin`` creates weights and tokenizer; plans need only these values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from halftune.core.packaged import read_yaml

# Every builtin model shares one tokenizer: byte-level BPE, 4,096 entries, these three control tokens first.
VOCAB_SIZE = 4096
PAD_TOKEN, START_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# What a model that sees or hears adds to the tokenizer: the names that processors look for, and the tokens; begin and
# end first.
IMAGE_TOKENS = {
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
AUDIO_TOKENS = {
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
    "audio_token": "<|AUDIO|>",
}


class _Copies(Mapping[str, dict[str, Any]]):
    """Each lookup returns a copy, since transformers writes into the nested values it is given."""

    def __init__(self, models: dict[str, dict[str, Any]]) -> None:
        self._models = models

    def __getitem__(self, name: str) -> dict[str, Any]:
        return copy.deepcopy(self._models[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)


BUILTIN_MODELS: Mapping[str, dict[str, Any]] = _Copies(
    {name: raw for name, raw in read_yaml("halftune.config", "builtin_models.yaml").items() if not name.startswith("_")}
)
