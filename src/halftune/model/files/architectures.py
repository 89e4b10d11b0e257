"""Registers this package's own architectures with transformers while a model is built; reads configurations."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from halftune.config.facts.families import OWN, multimodal_class
from halftune.config.facts.wrapped import WRAPPERS, unwrapped
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.model.files.load_errors import first_line
from halftune.model.rwkv7.configuration import RWKV7Config


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Inside, transformers shows no progress bars."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def ignore_peft_warnings() -> Iterator[None]:
    """Inside, peft causes no warnings about what needs no attention of users.

    It uses a deprecated attribute of transformers, and finds Conv1D layers by itself. ``share_tied`` ties what it does
    not tie.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`", category=UserWarning)
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False", category=UserWarning)
        yield


_CONFIGS: dict[str, type[PreTrainedConfig]] = {"rwkv7": RWKV7Config}
assert set(_CONFIGS) == OWN


@contextmanager
def own_architectures() -> Iterator[None]:
    """Inside, ``AutoConfig`` maps the model types of ``OWN`` to our classes.

    Previous registrations are restored on exit: flash-linear-attention registers its own class for ``rwkv7``.
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
    """Whether a checkpoint's remote code builds its model: if it is trusted and halftune has no implementation.

    Checkpoints of our architectures may contain code that imports flash-linear-attention; it is not used.
    """
    if not trust_remote_code:
        return False
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return raw.get("model_type") not in OWN


def remote_class(folder: Path) -> str | None:
    """``module.Class`` of a checkpoint's own code for a causal language model, by config.json's ``auto_map``."""
    try:
        listed = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map") or {}
        return listed.get("AutoModelForCausalLM")
    except (OSError, ValueError, AttributeError):
        return None


def is_multimodal(folder: Path, model: ModelSection) -> bool:
    """Whether a checkpoint is loaded with its towers, according to the class in its config.json.

    Raises:
        ModelError: ``model.parts: text`` is set, but transformers has no text-only class.
    """
    raw = unwrapped(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    return bool(multimodal_class(raw, model.parts, trust_remote_code=model.trust_remote_code, where=str(folder)))


def multimodal_auto(config: PreTrainedConfig) -> Any:
    """The auto class that builds a model with its towers."""
    # Audio Flamingo is in the last
    autos = (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)
    return next((auto for auto in autos if type(config) in auto._model_mapping), AutoModelForMultimodalLM)


def read_config(folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the configuration of a checkpoint, without its attention implementation; imports remote code if trusted.

    If a checkpoint contains several models, returns the configuration of the trained one.

    Raises:
        ModelError: transformers rejects a value in it.
    """
    try:
        with own_architectures():
            trusted = runs_its_code(folder, trust_remote_code=trust_remote_code)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        if (row := WRAPPERS.get(config.model_type)) is not None:
            config = getattr(config, row.part)
    except StrictDataclassError as error:
        raise ModelError(
            first_line(error), where=str(folder), remedy="download the checkpoint again", code="model.config_invalid"
        ) from error
    if isinstance(config, PreTrainedConfig):
        config._attn_implementation = None  # the plan sets it; the file's value may name code on the hub
    return config
