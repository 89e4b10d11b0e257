"""Transformers' processors of a part of the media, without torchvision."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import processor_class_from_name

from halftune.config.facts.folder import read_json

_PARTS = {"image_processor", "video_processor", "feature_extractor"}


def build_processor(folder: Path, name: str, tokenizer: PreTrainedTokenizerBase, **parts: Any) -> Any:
    """A processor with the settings of its folder and some of its parts; the others are None.

    Args:
        folder: of the model.
        name: of the processor's class.
        tokenizer: of the model.
        parts: ``image_processor``, ``feature_extractor``.

    Raises:
        ValueError: transformers has no such class.
    """
    base = _class(name)
    if base is None:
        raise ValueError(f"transformers has no {name}")
    # its check of the arguments' classes needs torchvision, for the video processor
    own = type(name, (base,), {"check_argument_for_proper_class": lambda *_: None})
    file = folder / "processor_config.json"
    saved = read_json(file) if file.is_file() else {}
    known = set(inspect.signature(base.__init__).parameters) - {"kwargs", "chat_template"}
    options = {name: value for name, value in saved.items() if name in known and not isinstance(value, dict)}
    module = sys.modules[base.__module__]
    if getattr(module, "num2words", module) is None:
        vars(module)["num2words"] = str  # SmolVLM's asks for this package, which only texts of videos need
    return own(tokenizer=tokenizer, **(options | dict.fromkeys(known & _PARTS) | parts))


def _class(name: str) -> Any:
    """The class of a processor by its name; None if transformers has none.

    Raises:
        ImportError: it needs a package that is not installed.
    """
    if name != "PixtralProcessor" or find_spec("torchvision"):
        return processor_class_from_name(name)
    # its module imports one function from the image processor for torchvision; that for PIL has the same
    package = "transformers.models.pixtral"
    place = f"{package}.image_processing_pixtral"
    sys.modules[place] = import_module(f"{package}.image_processing_pil_pixtral")
    try:
        return import_module(f"{package}.processing_pixtral").PixtralProcessor
    finally:
        del sys.modules[place]
