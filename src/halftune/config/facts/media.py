"""Model types that are trained on images, video or audio, one row each, and the parts of such a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from halftune.config.facts.folder import read_json
from halftune.config.facts.wrapped import unwrapped
from halftune.core.errors import DataError, MissingPackageError
from halftune.core.optional import pip_line, version_of

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_LONGEST = 1 << 14  # pixels of a side that images are scaled to
_SIDE_NAMES = ("height", "width", "shortest_edge", "longest_edge", "tile_size")
_MASK = "input_features_mask"
_QWEN = ("pixel_values", "image_grid_thw")
DATA_KEYS = {"image": "data.images", "video": "data.videos", "audio": "data.audio"}
# Why a model type that hears is not in the table.
REFUSED = {
    "voxtral_realtime": "it is fed a stream of audio, not questions with audio",
}
# The most that a feature extractor of speech may say: memory grows with each.
_MOST = {
    "chunk_length": 3600, "sampling_rate": 400_000, "hop_length": 1 << 16, "n_fft": 1 << 16, "feature_size": 1024,
    "audio_samples_per_token": 1 << 16, "min_length": 1 << 20, "frame_length_ms": 1000, "hop_length_ms": 1000,
}  # fmt: skip
Tower = Literal["vision", "audio", "projector"]
TOWERS: tuple[Tower, ...] = ("vision", "audio", "projector")
_PROJECTOR = re.compile(
    r"(^|\.)(multi_modal_projector|connector|projector|embed_vision|embed_audio|image_newline|merger"
    r"|(deepstack_)?merger_list|audio_tower\.proj[12]?)(\.|$)"
)
_AUDIO = re.compile(r"(^|\.)audio")


@dataclass(frozen=True)
class ImageFamily:
    """How a model type takes images.

    Attributes:
        processor: name of its class in transformers.
        expansion: how the text represents an image. ``count``: its token, repeated as the processor counts for the
            size; ``fixed``: one text for all sizes; ``size``: the text that the processor gives for a blank image.
        inputs: results of the image processor that the forward pass takes.
        token_types: argument of the forward pass that marks image tokens; empty if there is none.
        nested: the image processor takes a list of images for each sample.
        two_way: tokens of an image attend to later ones too, which neither packed rows nor attention backends without a
            mask can compute.
        torchvision: its image processor needs this package: transformers has none for PIL.
    """

    processor: str
    expansion: Literal["count", "fixed", "size"]
    inputs: tuple[str, ...]
    token_types: str = ""
    nested: bool = False
    two_way: bool = False
    torchvision: bool = False

    def used(self, *, images: bool) -> bool:
        """Whether a run on media calls the image processor: one for torchvision only if the run is on images."""
        return images or not self.torchvision

    @property
    def mrope(self) -> bool:
        """Positions have three axes (time, height, width), which packed rows state for each sample."""
        return "image_grid_thw" in self.inputs


IMAGE_FAMILIES = {
    "qwen2_vl": ImageFamily("Qwen2VLProcessor", "count", _QWEN, "mm_token_type_ids"),
    "qwen2_5_vl": ImageFamily("Qwen2_5_VLProcessor", "count", _QWEN, "mm_token_type_ids"),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        ImageFamily("Qwen3VLProcessor", "count", _QWEN, "mm_token_type_ids"),
    ),
    "glm4v": ImageFamily("Glm4vProcessor", "count", _QWEN, "mm_token_type_ids"),
    "glm46v": ImageFamily("Glm46VProcessor", "count", _QWEN, "mm_token_type_ids"),
    "qwen2_5_omni_thinker": ImageFamily("Qwen2_5OmniProcessor", "count", _QWEN),
    "qwen3_omni_moe_thinker": ImageFamily("Qwen3OmniMoeProcessor", "count", _QWEN),
    "paddleocr_vl": ImageFamily("PaddleOCRVLProcessor", "size", _QWEN, "mm_token_type_ids"),
    "gemma3": ImageFamily("Gemma3Processor", "fixed", ("pixel_values",), "token_type_ids", two_way=True),
    "gemma4": ImageFamily(
        "Gemma4Processor", "size", ("pixel_values", "image_position_ids"), "mm_token_type_ids",
        nested=True, two_way=True,
    ),
    "mistral3": ImageFamily("PixtralProcessor", "size", ("pixel_values", "image_sizes")),
    "llava": ImageFamily("LlavaProcessor", "count", ("pixel_values",)),
    "llava_next": ImageFamily("LlavaNextProcessor", "count", ("pixel_values", "image_sizes")),
    **{
        kind: ImageFamily(processor, "size", ("pixel_values", "pixel_attention_mask"), nested=True)
        for kind, processor in (("idefics3", "Idefics3Processor"), ("smolvlm", "SmolVLMProcessor"))
    },
    "internvl": ImageFamily("InternVLProcessor", "size", ("pixel_values",)),
    "gemma4_unified": ImageFamily(
        "Gemma4UnifiedProcessor", "size", ("pixel_values", "image_position_ids"), "mm_token_type_ids",
        nested=True, two_way=True, torchvision=True,
    ),
    "llama4": ImageFamily("Llama4Processor", "size", ("pixel_values",), torchvision=True),
    "lfm2_vl": ImageFamily(
        "Lfm2VlProcessor", "size", ("pixel_values", "pixel_attention_mask", "spatial_shapes"), nested=True,
        torchvision=True,
    ),
}  # fmt: skip
# Pixtral is a LLaVA with the tower and the processor of Mistral 3.
_WITH_PROCESSOR = {("llava", "PixtralProcessor"): IMAGE_FAMILIES["mistral3"]}
# Types whose towers pass cu_seqlens, the bounds of images and sounds, to attention, as FlashAttention takes them.
TOWERS_WITH_BOUNDS = frozenset(kind for kind, family in IMAGE_FAMILIES.items() if family.mrope) | {"qwen3_asr"}


@dataclass(frozen=True)
class VideoFamily:
    """How a model type takes video. All take patches of two frames, as ``pixel_values_videos``, and their grid.

    Attributes:
        rule: transformers' video processor, which says the frames that are taken and their size.
        seconds: argument of the forward pass that has the seconds between two patches; empty if the text has times.
        interval: key of config.json, in a section, whose value times these seconds is the distance of positions, and
            its default.
        runs_on: the text after a video begins behind its last position in time, too.
        shared: images have the same token, so that transformers cannot tell them apart in a batch.
    """

    rule: Literal["qwen2", "qwen3", "glm4v", "glm46v"]
    seconds: str = ""
    interval: tuple[str, str, int] = ("", "", 1)
    runs_on: bool = False
    shared: bool = False

    @property
    def split(self) -> bool:
        """Each pair of frames has placeholders of its own, with its time as text in front."""
        return self.rule != "qwen2"


VIDEO_FAMILIES = {
    "qwen2_vl": VideoFamily("qwen2"),
    "qwen2_5_vl": VideoFamily("qwen2", "second_per_grid_ts", ("vision_config", "tokens_per_second", 4)),
    "qwen2_5_omni_thinker": VideoFamily(
        "qwen2", "video_second_per_grid", ("", "position_id_per_seconds", 25), runs_on=True
    ),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), VideoFamily("qwen3")),
    "glm4v": VideoFamily("glm4v", shared=True),
    "glm46v": VideoFamily("glm46v", shared=True),
}


@dataclass(frozen=True)
class AudioFamily:
    """How a model type takes audio: features and their mask.

    Attributes:
        processor: name of its class in transformers.
        rule: how many tokens stand for a sound: a key of ``RULES`` in ``data/media/audio_tokens.py``.
        mask: argument of the forward pass that marks features; empty: the encoder takes whole windows, without one.
        seconds: the longest sound; 0: whole windows of ``chunk_length`` in the processor's ``max_audio_len``, or one.
        trimmed: features end with the longest sound; else the encoder takes them as the extractor pads them.
        bounds: tokens that the processor writes around a sound, or its attributes that hold them; else the chat
            template does.
        single: the processor takes one sound of a row.
        alone: features of a sound depend on it alone, in tests too: a frozen tower computes them once.
    """

    processor: str
    rule: str
    mask: str = "feature_attention_mask"
    seconds: float = 0
    trimmed: bool = False
    bounds: tuple[()] | tuple[str, str] = ()
    single: bool = False
    alone: bool = False


_GEMMA = ("boa_token", "eoa_token")
AUDIO_FAMILIES = {
    "qwen2_5_omni_thinker": AudioFamily("Qwen2_5OmniProcessor", "pooled", trimmed=True, alone=True),
    # 40 minutes: Qwen3-Omni, arXiv:2509.17765, section 2.1
    "qwen3_omni_moe_thinker": AudioFamily("Qwen3OmniMoeProcessor", "chunks", seconds=2400),
    "qwen2_audio": AudioFamily("Qwen2AudioProcessor", "pooled", alone=True),
    # 20 minutes: MAX_ASR_INPUT_SECONDS of github.com/QwenLM/Qwen3-ASR, qwen_asr/inference/utils.py
    "qwen3_asr": AudioFamily("Qwen3ASRProcessor", "chunks", _MASK, seconds=1200, single=True),
    "audioflamingo3": AudioFamily("AudioFlamingo3Processor", "pooled", _MASK, single=True),
    "musicflamingo": AudioFamily(
        "MusicFlamingoProcessor", "pooled", _MASK, bounds=("audio_bos_token", "audio_eos_token"), single=True
    ),
    "glmasr": AudioFamily("GlmAsrProcessor", "merged", _MASK, single=True),
    # 40 minutes to understand, 30 to transcribe: Voxtral, arXiv:2507.13264, and the card of Voxtral-Mini-3B-2507
    "voxtral": AudioFamily(
        "VoxtralProcessor", "whole", mask="", seconds=2400, bounds=("[BEGIN_AUDIO]", ""), alone=True
    ),
    # 30 s: the extractors' max_length, or the processor's audio_seq_length
    "gemma4": AudioFamily("Gemma4Processor", "strided", _MASK, seconds=30, bounds=_GEMMA),
    "gemma4_unified": AudioFamily("Gemma4UnifiedProcessor", "raw", _MASK, seconds=30, bounds=_GEMMA),
}


def kept_kinds(model_type: str, kinds: Collection[str]) -> tuple[str, ...]:
    """Of these kinds of media those whose features a frozen tower may compute once.

    transformers takes no pixels of videos beside features of images.
    """
    heard = AUDIO_FAMILIES.get(model_type)
    kept = {"image": "video" not in kinds, "audio": heard is not None and heard.alone}
    return tuple(kind for kind in kinds if kept.get(kind))


def wrong_extractor(content: dict[str, Any]) -> str:
    """The first value of a feature extractor that no model needs, in a processor's file; empty if there is none."""
    for name, most in _MOST.items():
        value = content.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            return f"{name}: {value!r:.40}; more than 0 and at most {most:,}"
    inner = content.get("feature_extractor")
    return wrong_extractor(inner) if isinstance(inner, dict) else ""


def image_family(folder: Path, kind: str) -> ImageFamily | None:
    """How the model of a type in a folder takes images; None if it is not trained on them."""
    return _image_family(kind, [read_json(path) for path in _processor_files(folder)])


def _image_family(kind: str, contents: list[dict[str, Any]]) -> ImageFamily | None:
    named = [(kind, str(one.get("processor_class"))) for one in contents]
    return next((_WITH_PROCESSOR[one] for one in named if one in _WITH_PROCESSOR), IMAGE_FAMILIES.get(kind))


def _processor_files(folder: Path) -> list[Path]:
    return [folder / name for name in PROCESSOR_FILES if (folder / name).is_file()]


def check_processor(folder: Path) -> list[Path]:
    """The files of a model's image processor.

    Raises:
        DataError: there are none, they name another processor than the model type has, or sides that no image needs.
        ModelError: one is not a JSON object.
    """
    files = _processor_files(folder)
    if not files:
        what = f"the model has no image processor ({PROCESSOR_FILES[0]})"
        remedy = "download the whole checkpoint"
        raise DataError(what, where=str(folder), remedy=remedy, code="model.no_image_processor")
    kind = str(unwrapped(read_json(folder / "config.json"))["model_type"])
    for what, remedy in _problems(kind, [read_json(path) for path in files]):
        raise DataError(what, where=str(folder), remedy=remedy, code="model.no_image_processor")
    return files


def check_torchvision(model_type: str) -> None:
    """Check that the image processor of a model type can run.

    Raises:
        MissingPackageError: it needs torchvision, which is not installed.
    """
    family = IMAGE_FAMILIES.get(model_type)
    if family is not None and family.torchvision and version_of("torchvision") is None:
        what = f"images of model type {model_type} require package torchvision"
        raise MissingPackageError(what, remedy=pip_line("torchvision"), code="core.package_missing")


def _problems(kind: str, contents: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """What is wrong with the processor of a model type, and the remedies."""
    family, correct = _image_family(kind, contents), f"correct {PROCESSOR_FILES[0]}"
    expected = AUDIO_FAMILIES[kind].processor if family is None else family.processor
    if named := {str(one.get("processor_class") or "") for one in contents} - {"", expected}:
        what = f"model type {kind} with a {', '.join(sorted(named))} is not supported"
        yield what, f"use a checkpoint with a {expected}"
    if kind in AUDIO_FAMILIES:
        for wrong in filter(None, map(wrong_extractor, contents)):
            yield f"the feature extractor has {wrong}", correct
    if family is not None and family.mrope:
        return
    for name, value in chain.from_iterable(map(_sides, contents)):
        if value > _LONGEST:
            what = f"the image processor scales images to {value:,} pixels ({name}); the maximum is {_LONGEST:,}"
            yield what, correct


def _sides(content: dict[str, Any]) -> list[tuple[str, float]]:
    """Name and pixels of the sides in ``size``, ``crop_size`` and the like, also in the image processor's section."""
    found = []
    for name, value in content.items():
        if isinstance(value, dict):
            found += [(f"{name}.{inner}", pixels) for inner, pixels in _sides(value)]
        elif isinstance(value, int | float) and name in _SIDE_NAMES:
            found.append((name, value))
    return found


def part_of(name: str) -> Tower:
    """The part that a weight or module of a tower belongs to, by its name in the model."""
    if _PROJECTOR.search(name):
        return "projector"
    return "audio" if _AUDIO.search(name) else "vision"
