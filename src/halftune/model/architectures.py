"""Architectures that transformers does not know and whose code is in this room, known to it while a model is made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from halftune.config.facts.model_types import OWN, multimodal_class
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.model.damage import first_line
from halftune.model.rwkv7.configuration import RWKV7Config

_CONFIGS: dict[str, type[PreTrainedConfig]] = {"rwkv7": RWKV7Config}
assert set(_CONFIGS) == OWN


@contextmanager
def own_architectures() -> Iterator[None]:
    """Inside, transformers' ``AutoConfig`` reads the model types of ``OWN`` as ours.

    Outside they mean what they meant before: flash-linear-attention, where it is imported, registers a class of its own
    for ``rwkv7``, and models that it makes stay its own.
    """
    registered = CONFIG_MAPPING._extra_content
    before = {name: registered[name] for name in _CONFIGS if name in registered}
    for name, config in _CONFIGS.items():
        AutoConfig.register(name, config, exist_ok=True)
    try:
        yield
    finally:
        for name in _CONFIGS:
            registered.pop(name, None)
        registered.update(before)


def runs_its_code(folder: Path, *, trust_remote_code: bool) -> bool:
    """Whether Python that comes with a checkpoint makes its model: where that is trusted and the architecture not ours.

    Checkpoints of our architectures may bring code that imports flash-linear-attention; their tokenizers, too, bring
    code, which is another matter.
    """
    if not trust_remote_code:
        return False
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return raw.get("model_type") not in OWN


def is_multimodal(folder: Path, model: ModelSection) -> bool:
    """Whether a checkpoint is loaded with its towers, by the class that its config.json names.

    Raises:
        ModelError: its language model is asked for alone, and no class has that.
    """
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool(multimodal_class(raw, model.parts, trust_remote_code=model.trust_remote_code, where=str(folder)))


def read_config(folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration object of a checkpoint, its own code imported where it brings some and is trusted.

    Raises:
        ModelError: transformers refuses a value in it.
    """
    try:
        with own_architectures():
            trusted = runs_its_code(folder, trust_remote_code=trust_remote_code)
            return AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    except StrictDataclassError as error:
        raise ModelError(first_line(error), where=str(folder), remedy="fetch the checkpoint again") from error
