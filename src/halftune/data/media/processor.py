"""A model's own processor: the placeholders of an image by its size, and the inputs of the forward pass.

torchvision is not needed: image processors are loaded in their PIL form, which every type of ``IMAGE_FAMILIES`` has.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import processor_class_from_name

from halftune.config.facts.images import IMAGE_FAMILIES, ImageFamily
from halftune.config.run import RunConfig
from halftune.core.errors import DataError
from halftune.data.control_tokens import ControlTokens
from halftune.data.locate import Turn
from halftune.data.mask import Rendering
from halftune.data.media.reference import BadImage, MediaRef, decode, images_same
from halftune.data.store import TokenStore

_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ImageSettings:
    """How images become tokens; part of the cache key.

    Attributes:
        model: folder with the processor's files.
        model_type: key of ``IMAGE_FAMILIES``.
        processor: sha256 of the processor's files.
        min_pixels, max_pixels: images are scaled to between these; None: no bound.
        on_bad: ``error`` or ``drop``, as ``data.on_bad_media``.
        folder: where paths of a source begin; empty if it has no folder.
    """

    model: str
    model_type: str
    processor: str
    min_pixels: int | None = None
    max_pixels: int | None = None
    on_bad: str = "error"
    folder: str = ""

    def of_source(self, path: str, media_folder: str | None) -> ImageSettings:
        """The settings of one source: paths are relative to its file, or to ``media_folder``."""
        source = Path(path)
        beside = source if source.is_dir() else source.parent if source.is_file() else ""
        return replace(self, folder=str(media_folder or beside))

    def unchanged(self, store: TokenStore) -> bool:
        """Whether all images that a store refers to are as they were."""
        return images_same(store)

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Width and height within the bounds, in the same proportion."""
        factor = 1.0
        if self.max_pixels is not None and width * height > self.max_pixels:
            factor = math.sqrt(self.max_pixels / (width * height))
        elif self.min_pixels is not None and width * height < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (width * height))
        if factor == 1.0:
            return width, height
        return max(1, int(width * factor)), max(1, int(height * factor))


def image_settings(config: RunConfig, folder: Path) -> ImageSettings:
    """The settings of a run.

    Args:
        config: reads the image keys of ``data``.
        folder: the model's folder.

    Raises:
        DataError: it has no processor, or another one than its type has.
    """
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    if not files:
        raise DataError(
            "the model has no image processor (preprocessor_config.json)",
            where=str(folder),
            remedy="download the whole checkpoint",
            code="model.no_image_processor",
        )
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    named = {str(json.loads(path.read_text(encoding="utf-8")).get("processor_class") or "") for path in files} - {""}
    if named - {IMAGE_FAMILIES[kind].processor}:
        raise DataError(
            f"model type {kind} with a {', '.join(sorted(named))} is not supported",
            where=str(folder),
            remedy=f"use a checkpoint with a {IMAGE_FAMILIES[kind].processor}",
            code="model.no_image_processor",
        )
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
    data = config.data
    return ImageSettings(str(folder), kind, digest, data.image_min_pixels, data.image_max_pixels, data.on_bad_media)


class ImageProcessor:
    """The processor of a model type.

    Args:
        settings: names the model.
        tokenizer: has the placeholders' tokens.

    Raises:
        DataError: the processor cannot be built from its files.
    """

    def __init__(self, settings: ImageSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self.settings, self.family = settings, IMAGE_FAMILIES[settings.model_type]
        try:
            self._own: Any = _build(settings, self.family, tokenizer)
        except (OSError, ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
            raise DataError(
                f"the image processor cannot be built: {str(error).splitlines()[0] if str(error) else error!r}",
                where=settings.model,
                remedy="check preprocessor_config.json and the tokenizer's image tokens",
                code="model.no_image_processor",
            ) from error
        self.expansion = cache(self._expansion)

    @property
    def token(self) -> str:
        """What the chat template writes for an image."""
        return self._own.image_token

    @property
    def merge(self) -> int:
        """Patches of a token, along each side."""
        return self._own.image_processor.merge_size

    @cached_property
    def _options(self) -> dict[str, Any]:
        return self._own._merge_kwargs(
            self._own.valid_processor_kwargs, tokenizer_init_kwargs=self._own.tokenizer.init_kwargs
        )["images_kwargs"]

    def text(self, ref: MediaRef) -> str:
        """The text that stands for an image.

        Raises:
            BadImage: the processor refuses its size.
        """
        size = self.settings.fitted(ref.width, ref.height)
        fixed = self.family.expansion == "fixed" and not getattr(self._own.image_processor, "do_pan_and_scan", False)
        try:
            return self.expansion(*((1, 1) if fixed else size))
        except (ValueError, ZeroDivisionError) as error:
            raise BadImage(f"{ref.path or 'the image in the row'}: {str(error).splitlines()[0]}") from error

    def write(self, text: str, refs: Sequence[MediaRef]) -> str | None:
        """A rendered conversation with the texts of its images; None if it has not one placeholder for each.

        Raises:
            BadImage: the processor refuses a size.
        """
        pieces = text.split(self.token)
        if len(pieces) != len(refs) + 1:
            return None
        texts = [self.text(ref) for ref in refs]
        return pieces[0] + "".join(one + piece for one, piece in zip(texts, pieces[1:], strict=True))

    def _expansion(self, width: int, height: int) -> str:
        if self.family.expansion == "count":
            counted = self._own._get_num_multimodal_tokens(image_sizes=[[height, width]])
            return self.token * int(counted.num_image_tokens[0])
        blank = [Image.new("RGB", (width, height))]
        return self._own._process_images([blank] if self.family.nested else blank, **self._options)[1][0]

    def inputs(self, refs: Sequence[Sequence[MediaRef]]) -> dict[str, torch.Tensor]:
        """The forward pass's arguments for the images of each segment, in the order of their placeholders.

        Raises:
            BadImage: an image is damaged or changed.
        """
        groups = [[self._resized(ref) for ref in group] for group in refs]
        images = groups if self.family.nested else [image for group in groups for image in group]
        made = self._own.image_processor(images, **{**self._options, "return_tensors": "pt"})
        return {name: made[name] for name in self.family.inputs if name in made}

    def _resized(self, ref: MediaRef) -> Image.Image:
        image, size = decode(ref), self.settings.fitted(ref.width, ref.height)
        return image if image.size == size else image.resize(size)

    def token_types(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """int64, of the shape of ``ids``: 1 for image tokens; empty where the forward pass takes none."""
        if not self.family.token_types:
            return {}
        values = self._own.create_mm_token_type_ids(ids.tolist())
        return {self.family.token_types: torch.tensor(values, dtype=torch.int64)}


def _build(settings: ImageSettings, family: ImageFamily, tokenizer: PreTrainedTokenizerBase) -> Any:
    folder = Path(settings.model)
    base = processor_class_from_name(family.processor)
    if base is None:
        raise ValueError(f"transformers has no {family.processor}")
    # its check of the arguments' classes needs torchvision, for the video processor
    own = type(family.processor, (base,), {"check_argument_for_proper_class": lambda *_: None})
    file = folder / "processor_config.json"
    saved = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    known = set(inspect.signature(base.__init__).parameters) - {"kwargs", "chat_template"}
    options = {name: value for name, value in saved.items() if name in known and not isinstance(value, dict)}
    options |= dict.fromkeys(known & {"video_processor", "feature_extractor"})
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    module = sys.modules[base.__module__]
    if getattr(module, "num2words", module) is None:
        vars(module)["num2words"] = str  # SmolVLM's asks for this package, which only texts of videos need
    return own(image_processor=images, tokenizer=tokenizer, **options)


def expand(
    rendering: Rendering, control: ControlTokens, token: str, texts: Sequence[str], media: bytes
) -> Rendering | None:
    """The rendering with each image's placeholder replaced by its text, which has no labels; turns move along.

    None if the chat template did not write one placeholder for each image.

    Args:
        rendering: control tokens are aliases.
        control: the control tokens.
        token: the placeholder that the chat template writes.
        texts: one for each image, in order.
        media: the references of the images.
    """
    alias = control.alias_of(token) if token in control.tokens else ""
    pieces = rendering.text.split(alias) if alias else [rendering.text]
    if len(pieces) != len(texts) + 1:
        return None
    places, moved, inside, text = [], [0], [], pieces[0]
    for piece, inserted in zip(pieces[1:], (control.alias(one) for one in texts), strict=True):
        places.append(len(text) - moved[-1])  # in the rendering as it was
        moved.append(moved[-1] + len(inserted) - len(alias))
        inside.append((len(text), len(text) + len(inserted)))
        text += inserted + piece

    def now(place: int) -> int:
        return place + moved[sum(place > before for before in places)]

    turns = tuple(_moved(turn, now) for turn in rendering.turns)
    untrained = (*((now(start), now(end)) for start, end in rendering.untrained), *inside)
    return replace(rendering, text=text, turns=turns, untrained=untrained, media=media)


def _moved(turn: Turn, now: Any) -> Turn:
    return replace(turn, start=now(turn.start), end=now(turn.end), full_end=now(turn.full_end))
