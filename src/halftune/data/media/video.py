"""A model's own video processor, computed without torchvision: frames taken, their size, placeholders and patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils.constants import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)
from transformers.video_utils import VideoMetadata

from halftune.config.facts.folder import read_json
from halftune.config.facts.media import VIDEO_FAMILIES
from halftune.config.facts.wrapped import unwrapped
from halftune.data.media.frames import NotVideo, decoded
from halftune.data.media.reference import BadMedia, MediaRef, read_content

_QWEN2 = {
    "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_frames": 4, "max_frames": 768, "fps": 2.0,
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}, "max_video_tokens": 128_000,
    "image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD, "resample": 3, "rescale_factor": 1 / 255,
}  # fmt: skip
_GLM = _QWEN2 | {"max_duration": 300, "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30_000}}
# Of the classes in transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {
        "patch_size": 16, "image_mean": IMAGENET_STANDARD_MEAN, "image_std": IMAGENET_STANDARD_STD,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}, "max_video_tokens": 768,
    },
    "glm4v": _GLM,
    "glm46v": _GLM,
}  # fmt: skip
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_FILTERS = {2: "bilinear", 3: "bicubic"}  # of Pillow's numbers, those that torch has
_ASPECT = 200  # longest side, by the shortest


@dataclass(frozen=True)
class VideoSettings:
    """What a run asks of its videos, instead of what the processor's files say.

    Attributes:
        fps: frames taken per second.
        max_frames: at most.
        min_pixels, max_pixels: of a frame.
    """

    fps: float | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


AS_PROCESSOR = VideoSettings()


class VideoProcessor:
    """The video part of a model's processor.

    Args:
        model: folder with its files.
        model_type: key of ``VIDEO_FAMILIES``.
        own: the model's processor of transformers; gets the two sizes that it asks its video processor for.
        settings: of the run.

    Raises:
        ValueError: the files ask for what is not supported.
    """

    def __init__(self, model: str, model_type: str, own: Any, settings: VideoSettings) -> None:
        self.family, self._own, self._asked = VIDEO_FAMILIES[model_type], own, settings
        self._model = Path(model)
        self._options = self._of_files()
        self._numbers = cache(self._sampled)
        self.token: str = own.video_token
        own.video_processor = SimpleNamespace(
            merge_size=self._options["merge_size"], temporal_patch_size=self._options["temporal_patch_size"]
        )

    def _of_files(self) -> dict[str, Any]:
        """Values of the processor's files, in transformers' order, and of its class."""
        named = (self._model / "video_preprocessor_config.json", self._model / "preprocessor_config.json")
        nested = self._model / "processor_config.json"
        content = (read_json(nested) if nested.is_file() else {}).get("video_processor")
        if not isinstance(content, dict):
            content = next((read_json(file) for file in named if file.is_file()), {})
        given = {name: value for name, value in content.items() if value is not None}
        size = dict(given.get("size") or _DEFAULTS[self.family.rule]["size"])
        if self.family.rule == "qwen2":  # older names
            size |= {edge: given[key] for key, edge in _EDGES.items() if key in given}
        made = _DEFAULTS[self.family.rule] | given | {"size": size} | (getattr(self._own, "videos_kwargs", None) or {})
        for key in ("do_resize", "do_rescale", "do_normalize"):
            if made.get(key) is False:
                raise ValueError(f"the video processor has {key}: false, which is not supported")
        if made["resample"] not in _FILTERS:
            raise ValueError(f"the video processor has resample: {made['resample']}; supported: {list(_FILTERS)}")
        return made

    @cached_property
    def _fps(self) -> float:
        return float(self._asked.fps or self._options["fps"])

    def taken(self, ref: MediaRef) -> list[int]:
        """Numbers of the frames that the model takes."""
        return self._numbers(ref.frames, ref.fps)

    def _sampled(self, total: int, rate: float) -> list[int]:
        found = _SAMPLED[self.family.rule](total, rate, self._options, self._asked)
        most = self._asked.max_frames
        if most is not None and len(found) > most:
            found = [found[place] for place in np.linspace(0, len(found) - 1, most).round().astype(int)]
        return found

    def grid(self, ref: MediaRef) -> tuple[int, int, int]:
        """Patches along time, height and width.

        Raises:
            BadMedia: the processor refuses its length or shape.
        """
        frames, patch = len(self.taken(ref)), self._options["patch_size"]
        height, width = self._size(frames, ref)
        return -(-frames // self._options["temporal_patch_size"]), height // patch, width // patch

    def text(self, ref: MediaRef) -> str:
        """The text that stands for a video.

        Raises:
            BadMedia: as ``grid``.
        """
        metadata = VideoMetadata(
            ref.frames, fps=ref.fps, duration=ref.frames / ref.fps, frames_indices=list(self.taken(ref))
        )
        given = {"video_grid_thw": torch.tensor([self.grid(ref)]), "video_metadata": [metadata]}
        return self._own.replace_video_token(given, 0, load_audio_from_video=False)

    def seconds(self, ref: MediaRef) -> float:
        """Seconds between two patches, as the model type's processor gives them."""
        measured = self.family.seconds == "second_per_grid_ts"
        fps = len(self.taken(ref)) / ref.frames * ref.fps if measured else self._fps
        return self._options["temporal_patch_size"] / fps

    @cached_property
    def interval(self) -> int:
        """Positions of a second."""
        section, key, default = self.family.interval
        config = unwrapped(read_json(self._model / "config.json"))
        return (config.get(section, {}) if section else config).get(key, default)

    def inputs(self, refs: Sequence[MediaRef]) -> dict[str, Tensor]:
        """``pixel_values_videos`` ``[P, F]`` and ``video_grid_thw`` ``[V, 3]`` of V videos, in order; and seconds.

        Raises:
            BadMedia: a file is damaged or changed.
        """
        made = {
            "pixel_values_videos": torch.cat([self._patches(ref) for ref in refs]),
            "video_grid_thw": torch.tensor([self.grid(ref) for ref in refs]),
        }
        if self.family.seconds:
            made[self.family.seconds] = torch.tensor([self.seconds(ref) for ref in refs])
        return made

    def _patches(self, ref: MediaRef) -> Tensor:
        """fp32 ``[T·H·W, C·t·p·p]``; each frame is scaled before the next one is decoded."""
        taken = self.taken(ref)
        size, once = self._size(len(taken), ref), sorted(set(taken))
        encoded, name = read_content(ref), ref.path or "the video in the row"
        try:
            scaled = [self._scaled(one, ref, size) for one in decoded(encoded, once)]
        except NotVideo as error:
            raise BadMedia(f"{name}: {error}") from error
        frames = [scaled[once.index(number)] for number in taken]
        depth, patch, merge = (self._options[key] for key in ("temporal_patch_size", "patch_size", "merge_size"))
        frames += frames[-1:] * (-len(frames) % depth)
        factor = 1 / self._options["rescale_factor"]
        mean, std = (torch.tensor(self._options[key])[:, None, None] * factor for key in ("image_mean", "image_std"))
        pixels = torch.stack(frames).float().sub_(mean).div_(std)
        count, channels, height, width = pixels.shape
        cut = pixels.view(
            count // depth, depth, channels,
            height // patch // merge, merge, patch, width // patch // merge, merge, patch,
        ).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # fmt: skip
        return cut.reshape(-1, channels * depth * patch * patch)

    def _scaled(self, frame: np.ndarray, ref: MediaRef, size: tuple[int, int]) -> Tensor:
        """uint8 ``[C, H, W]``, as torchvision scales it."""
        if frame.shape[:2] != (ref.height, ref.width):
            raise NotVideo("its frames have several sizes")
        image = torch.from_numpy(frame).permute(2, 0, 1)[None]
        if size != (ref.height, ref.width):
            mode = _FILTERS[self._options["resample"]]
            image = torch.nn.functional.interpolate(image, size, mode=mode, antialias=True, align_corners=False)
        return image[0]

    def _size(self, frames: int, ref: MediaRef) -> tuple[int, int]:
        """Height and width that each frame is scaled to.

        Raises:
            BadMedia: the processor refuses them.
        """
        try:
            return self._fitted(frames, ref.height, ref.width)
        except (ValueError, ArithmeticError) as error:
            raise BadMedia(f"{ref.path or 'the video in the row'}: {str(error).splitlines()[0]}") from error

    def _fitted(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """As ``smart_resize`` of the model type's video processor: multiples of a token, within bounds of pixels.

        The bounds are those of one frame for the rule of Qwen2-VL, and of all frames for the others.
        """
        each, depth = self.family.rule == "qwen2", self._options["temporal_patch_size"]
        factor, whole = self._options["patch_size"] * self._options["merge_size"], frames
        if each:
            frames = rounded = 1
        elif frames < depth:
            raise ValueError(f"{frames} frame; the model takes at least {depth}")
        else:
            rounded = round(frames / depth) * depth
        if not each and min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > _ASPECT * min(height, width):
            raise ValueError(f"{width} × {height} pixels; one side may be {_ASPECT} times as long as the other")
        low, high = self._bounds(frames, whole, factor)
        made = [round(side / factor) * factor for side in (height, width)]
        if rounded * math.prod(made) > high:
            beta = math.sqrt(frames * height * width / high)
            return tuple(max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
        if rounded * math.prod(made) < low:
            beta = math.sqrt(low / (frames * height * width))
            return tuple(math.ceil(side * beta / factor) * factor for side in (height, width))
        return made[0], made[1]

    def _bounds(self, frames: int, whole: int, factor: int) -> tuple[int, int]:
        """Pixels of ``frames``, of ``whole`` in all: at least and at most."""
        options, asked = self._options, self._asked
        low, high = options["size"]["shortest_edge"], options["size"]["longest_edge"]
        if options.get("cap_pixels_per_frame"):
            most, least = options["max_video_tokens"] * factor * factor, int(low * 1.05)
            if self.family.rule == "qwen2":
                high = max(min(high, int(most * 0.9) * options["temporal_patch_size"] // whole), least)
            elif self.family.rule == "qwen3":
                high = max(min(most, high // whole), least) * whole
        high = high if asked.max_pixels is None else asked.max_pixels * frames
        low = min(low, high) if asked.min_pixels is None else asked.min_pixels * frames
        return low, max(low, high)


def _qwen2(total: int, rate: float, options: dict[str, Any], asked: VideoSettings) -> list[int]:
    depth, fps = options["temporal_patch_size"], asked.fps or options["fps"]
    most = math.floor(min(asked.max_frames or options["max_frames"], total) / depth) * depth
    count = min(max(total / rate * fps, options["min_frames"]), most, total)
    count = max(1, math.floor(count / depth) * depth)
    return torch.arange(0, total, total / count).int().tolist()


def _qwen3(total: int, rate: float, options: dict[str, Any], asked: VideoSettings) -> list[int]:
    most = asked.max_frames or options["max_frames"]
    count = min(max(int(total / rate * (asked.fps or options["fps"])), options["min_frames"]), most, total)
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


def _glm4v(total: int, rate: float, options: dict[str, Any], asked: VideoSettings) -> list[int]:
    duration, fps, most = total / rate, asked.fps or options["fps"], options["max_duration"]
    if duration <= most:
        found = [math.ceil(index * rate / fps) for index in range(max(1, math.floor(duration * fps)))]
    elif int(most * fps) >= total:
        found = list(range(total))
    else:
        found = [math.ceil(time * rate) for time in np.linspace(0, duration, int(most * fps))]
    return _even(min(total - 1, number) for number in found)


def _glm46v(total: int, rate: float, options: dict[str, Any], asked: VideoSettings) -> list[int]:
    duration, depth = total / rate, options["temporal_patch_size"]
    seconds = min(duration, 2400)
    fps = 3 if seconds <= 30 else 1 if seconds <= 300 else 0.5
    fps = asked.fps / depth if asked.fps else fps
    count = min(int(seconds * fps * depth), 640)
    found = list(_each(total, rate, 1 / (depth * fps), int(duration))) if total >= count else []
    if total < count or len(found) > count:
        found = np.linspace(0, total - 1, count, dtype=int).tolist()
    elif len(found) < count:
        found = np.linspace(found[0], found[-1], count, dtype=int).tolist()
    return _even(found)


def _each(total: int, rate: float, period: float, last: int) -> Iterator[int]:
    """The first frame of each period of seconds."""
    due = 0.0
    for number in range(total):
        if number * (1 / rate) >= due:
            due += period
            yield number
            if due >= last:
                return


def _even(found: Any) -> list[int]:
    """Each number once, and the last one twice if there would be an odd number of them."""
    once = list(dict.fromkeys(found))
    return once + once[-1:] * (len(once) % 2)


_SAMPLED: dict[str, Callable[[int, float, dict[str, Any], VideoSettings], list[int]]] = {
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "glm4v": _glm4v,
    "glm46v": _glm46v,
}
