"""Classes of transformers' processors, without torchvision."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from transformers.models.auto.processing_auto import processor_class_from_name


def processor_class(name: str) -> Any:
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
