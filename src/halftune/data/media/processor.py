"""A model's own processor: the placeholders of an image or a video by its size, and the forward pass's inputs.

Image processors are loaded in their PIL form, with which torchvision is not needed; in that for torchvision only where
transformers has no other.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedTokenizerBase

from halftune.config.facts.folder import read_json
from halftune.config.facts.media import ImageFamily, check_processor, check_torchvision, image_family
from halftune.config.facts.wrapped import unwrapped
from halftune.config.run import RunConfig
from halftune.core.errors import DataError
from halftune.data.media.audio import AudioProcessor
from halftune.data.media.processor_class import build_processor
from halftune.data.media.reference import BadMedia, MediaRef, decode, media_same, places
from halftune.data.media.video import AS_PROCESSOR, VideoProcessor, VideoSettings
from halftune.data.store import TokenStore
from halftune.data.templates.assistant_turns import Turn
from halftune.data.templates.control_tokens import ControlTokens
from halftune.data.templates.loss_mask import Rendering

_NO_IMAGES = ImageFamily("", "count", ())
_BESIDE = ("use_image_special_tokens",)  # options of LFM2-VL's images that are not among those of its image processor
# Of transformers, for a folder whose files do not fit together.
_BUILD_ERRORS = (
    OSError, ValueError, TypeError, AttributeError, ImportError, LookupError, ArithmeticError, RuntimeError,
)  # fmt: skip


@dataclass(frozen=True)
class MediaSettings:
    """How images become tokens; part of the cache key.

    Attributes:
        model: folder with the processor's files.
        model_type: key of ``IMAGE_FAMILIES``.
        processor: sha256 of the processor's files.
        min_pixels, max_pixels: images are scaled to between these; None: no bound.
        on_bad: ``error`` or ``drop``, as ``data.on_bad_media``.
        folder: where paths of a source begin; empty if it has no folder.
        kinds: ``image``, ``video``, ``audio``: what is trained.
        max_seconds: the longest sound; None: the model's limit.
        video: frames and size of videos.
    """

    model: str
    model_type: str
    processor: str
    min_pixels: int | None = None
    max_pixels: int | None = None
    on_bad: str = "error"
    folder: str = ""
    kinds: tuple[str, ...] = ("image",)
    max_seconds: float | None = None
    video: VideoSettings = AS_PROCESSOR

    def of_source(self, path: str, media_folder: str | None) -> MediaSettings:
        """The settings of one source: paths are relative to its file, or to ``media_folder``."""
        source = Path(path)
        beside = source if source.is_dir() else source.parent if source.is_file() else ""
        return replace(self, folder=str(media_folder or beside))

    def unchanged(self, store: TokenStore, files: Mapping[str, list[Any]]) -> bool:
        """Whether all images that a store refers to are as they were, and the places of those of dropped rows."""
        return media_same(store) and places(files) == files

    def with_images(self, fingerprint: str, store: TokenStore) -> str:
        """A source's fingerprint that also depends on the content of its images; itself for one without images."""
        if not len(store.media_at):
            return fingerprint
        digest = hashlib.sha256(fingerprint.encode())
        for index in range(len(store)):
            digest.update(store.digests(index) + b"\n")
        return digest.hexdigest()

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


def media_settings(config: RunConfig, folder: Path) -> MediaSettings:
    """The settings of a run.

    Args:
        config: reads the image keys of ``data``.
        folder: the model's folder.

    Raises:
        DataError, ModelError: as ``check_processor``.
        MissingPackageError: as ``check_torchvision``.
    """
    files, kind = check_processor(folder), str(unwrapped(read_json(folder / "config.json"))["model_type"])
    if config.data.images:
        check_torchvision(kind)
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
    data = config.data
    pixels = (data.image_min_pixels, data.image_max_pixels)
    video = VideoSettings(data.video_fps, data.video_max_frames, data.video_min_pixels, data.video_max_pixels)
    options = {"kinds": data.media, "max_seconds": data.audio_max_seconds, "video": video}
    return MediaSettings(str(folder), kind, digest, *pixels, data.on_bad_media, **options)


class MediaProcessor:
    """The processor of a model type.

    Args:
        settings: names the model.
        tokenizer: has the placeholders' tokens.

    Raises:
        DataError: the processor cannot be built from its files.
    """

    def __init__(self, settings: MediaSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self.settings = settings
        self.family = image_family(Path(settings.model), settings.model_type) or _NO_IMAGES
        if not self.family.used(images="image" in settings.kinds):
            self.family = _NO_IMAGES
        self.audio: AudioProcessor | None = None
        self.video: VideoProcessor | None = None
        self._own: Any = None
        try:
            if "audio" in settings.kinds:
                self.audio = AudioProcessor(settings.model, settings.model_type, tokenizer, settings.max_seconds)
            if self.family.processor:
                folder = Path(settings.model)
                # torchvision scales images to slightly other pixels; unset, trust_remote_code asks
                backend = "torchvision" if self.family.torchvision else "pil"
                seen = AutoImageProcessor.from_pretrained(folder, backend=backend, trust_remote_code=False)
                self._own = build_processor(folder, self.family.processor, tokenizer, image_processor=seen)
            if "video" in settings.kinds:
                self.video = VideoProcessor(settings.model, settings.model_type, self._own, settings.video)
        except _BUILD_ERRORS as error:
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            raise DataError(
                f"the image processor cannot be built: {reason}",
                where=settings.model,
                remedy="check preprocessor_config.json and the tokenizer's image tokens",
                code="model.no_image_processor",
            ) from error
        self.expansion = cache(self._expansion)

    @property
    def token(self) -> str:
        """What the chat template writes for an image."""
        return self._own.image_token

    def token_of(self, ref: MediaRef) -> str:
        """What the chat template writes for an image, a video or a sound."""
        part = self._part(ref)
        return self.token if part is None else part.token

    def _part(self, ref: MediaRef) -> AudioProcessor | VideoProcessor | None:
        return {"audio": self.audio, "video": self.video}.get(ref.kind)

    @property
    def merge(self) -> int:
        """Patches of a token, along each side."""
        return self._own.image_processor.merge_size

    @cached_property
    def _options(self) -> dict[str, Any]:
        merged = self._own._merge_kwargs(
            self._own.valid_processor_kwargs, tokenizer_init_kwargs=self._own.tokenizer.init_kwargs
        )
        return merged["images_kwargs"] | {name: merged[name] for name in _BESIDE if name in merged}

    def texts(self, refs: Sequence[MediaRef]) -> list[str]:
        """The texts that stand for the media of a conversation, in order.

        Raises:
            BadMedia: the processor refuses a size or a length.
        """
        sounds = iter(self.audio.texts([ref for ref in refs if ref.is_audio]) if self.audio is not None else ())
        return [next(sounds) if ref.is_audio else self._text(ref) for ref in refs]

    def _text(self, ref: MediaRef) -> str:
        if self.video is not None and ref.kind == "video":
            return self.video.text(ref)
        size = self.settings.fitted(ref.width, ref.height)
        fixed = self.family.expansion == "fixed" and not getattr(self._own.image_processor, "do_pan_and_scan", False)
        try:
            return self.expansion(*((1, 1) if fixed else size))
        except (ValueError, ZeroDivisionError) as error:
            raise BadMedia(f"{ref.path or 'the image in the row'}: {str(error).splitlines()[0]}") from error

    def write(self, text: str, refs: Sequence[MediaRef]) -> str | None:
        """A rendered conversation with the texts of its media; None if it has not one placeholder for each.

        Raises:
            BadMedia: the processor refuses a size.
        """
        pieces = split_at(text, [self.token_of(ref) for ref in refs])
        if pieces is None:
            return None
        texts = self.texts(refs)
        return pieces[0] + "".join(one + piece for one, piece in zip(texts, pieces[1:], strict=True))

    def _expansion(self, width: int, height: int) -> str:
        if self.family.expansion == "count":
            counted = self._own._get_num_multimodal_tokens(image_sizes=[[height, width]])
            return self.token * int(counted.num_image_tokens[0])
        blank = [Image.new("RGB", (width, height))]
        return self._own._process_images([blank] if self.family.nested else blank, **self._options)[1][0]

    def inputs(self, refs: Sequence[Sequence[MediaRef]]) -> dict[str, torch.Tensor]:
        """The forward pass's arguments for the media of each segment, in the order of their placeholders.

        Raises:
            BadMedia: a file is damaged or changed.
        """
        others: dict[str, torch.Tensor] = {}
        heard = [[ref for ref in group if ref.is_audio] for group in refs]
        if self.audio is not None and any(heard):
            others |= self.audio.inputs(heard)
        if self.video is not None and (seen := [ref for ref in chain.from_iterable(refs) if ref.kind == "video"]):
            others |= self.video.inputs(seen)
        once = cache(decode)  # answers to one prompt have the same images
        groups = [self._images(group, once) for group in refs]
        if not any(groups):
            return others
        images = groups if self.family.nested else list(chain.from_iterable(groups))
        made, _ = self._own._process_images(images, **{**self._options, "return_tensors": "pt"})
        taken = {name: made[name] for name in self.family.inputs if name in made}
        # Llama 4's pixels are bf16, whatever the model's dtype
        return others | {name: one.float() if one.is_floating_point() else one for name, one in taken.items()}

    def _images(self, refs: Sequence[MediaRef], decoded: Callable[[MediaRef], Image.Image]) -> list[Image.Image]:
        """The images among the media of a segment, scaled to the bounds."""
        pairs = [(decoded(ref), self.settings.fitted(ref.width, ref.height)) for ref in refs if ref.kind == "image"]
        return [image if image.size == size else image.resize(size) for image, size in pairs]

    def media_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """int64, of the shape of ``ids``: 1 for image tokens, 2 for video tokens, else 0."""
        if self.family.token_types:
            return torch.tensor(self._own.create_mm_token_type_ids(ids.tolist()), dtype=torch.int64)
        seen = (ids == self._own.image_token_id).long()
        return seen if self.video is None else seen + 2 * (ids == self._own.video_token_id)

    def token_types(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """int64, of the shape of ``ids``: as ``media_tokens``; empty where the forward pass takes none."""
        return {self.family.token_types: self.media_tokens(ids)} if self.family.token_types else {}


def expand(
    rendering: Rendering, control: ControlTokens, tokens: Sequence[str], texts: Sequence[str], media: bytes
) -> Rendering | None:
    """The rendering with each placeholder replaced by its text, which has no labels; turns move along.

    None if the chat template did not write one placeholder for each image and sound, in their order.

    Args:
        rendering: control tokens are aliases.
        control: the control tokens.
        tokens: the placeholders that the chat template writes, in order.
        texts: one for each of them.
        media: the references.
    """
    if any(token not in control.tokens for token in tokens):
        return None
    aliases = [control.alias_of(token) for token in tokens]
    pieces = split_at(rendering.text, aliases)
    if pieces is None:
        return None
    places, moved, inside, text = [], [0], [], pieces[0]
    for piece, inserted in zip(pieces[1:], (control.alias(one) for one in texts), strict=True):
        places.append(len(text) - moved[-1])  # in the rendering as it was
        moved.append(moved[-1] + len(inserted) - 1)  # an alias is one character
        inside.append((len(text), len(text) + len(inserted)))
        text += inserted + piece

    def now(place: int) -> int:
        return place + moved[sum(place > before for before in places)]

    turns = tuple(_moved(turn, now) for turn in rendering.turns)
    untrained = (*((now(start), now(end)) for start, end in rendering.untrained), *inside)
    return rendering._replace(text=text, turns=turns, untrained=untrained, media=media)


def split_at(text: str, tokens: Sequence[str]) -> list[str] | None:
    """The pieces of a text around its placeholders; None if they are not these, in this order."""
    if not tokens:
        return [text]
    known = "|".join(re.escape(token) for token in dict.fromkeys(tokens))
    pieces = re.split(f"({known})", text)
    return pieces[::2] if pieces[1::2] == list(tokens) else None


def _moved(turn: Turn, now: Any) -> Turn:
    return turn._replace(start=now(turn.start), end=now(turn.end), full_end=now(turn.full_end))
