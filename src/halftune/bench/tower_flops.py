"""Floating-point operations of vision and audio towers, by what a forward pass feeds them.

A product with N weights costs 2N per position forward, 2N for the gradient of its input and 2N for that of its weights.
Positions are patches, frames after the encoder's strided convolution, or tokens for a projector. Attention costs
4·width·n² forward and twice that backward, for each group of n positions that attend to each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch

from halftune.config.facts.architecture import Tensor
from halftune.config.facts.media import AUDIO_FAMILIES, IMAGE_FAMILIES, Tower, part_of
from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.config.sections.model import LoraAdapter
from halftune.hardware.tower_memory import merges, patches_per_token, unread_layers
from halftune.plan.weights.parts import adapter_size, modes

INPUTS = ("pixel_values", "image_grid_thw", "image_sizes", "spatial_shapes", "input_features", "feature_attention_mask")
_CLASS = ("class_embedding", "cls_token")  # a position besides the patches
_HEAD = ".head."
_VALUE = re.compile(r"\.(v|v_proj|qkv)(\.linear)?$")  # layers with the width of attention, or three times that


@dataclass(frozen=True)
class _Seen:
    """What a tower computes.

    Attributes:
        units: rows of its first product: patches, or frames of a spectrogram.
        positions: rows of its layers.
        tokens: rows of its projector.
        groups: numbers of positions that attend to each other, for each layer; the last for all further ones.
    """

    units: int
    positions: int
    tokens: int
    groups: Sequence[Sequence[int]]


def tower_flops(facts: ModelFacts, config: RunConfig, fed: Mapping[str, torch.Tensor]) -> float:
    """Operations of the towers in one forward and backward pass; forward only for what is frozen.

    Args:
        facts: the model.
        config: says which parts are trained.
        fed: those of ``INPUTS`` that the forward pass got; none of them where features are cached.
    """
    chosen, total = modes(config), 0.0
    for tower, seen in _seen(facts, fed):
        reaches = False  # gradients for the inputs of a product, which something before it is trained by
        for part in (tower, "projector"):
            weights, mode = _weights(facts, tower, part), chosen[part]
            for flops, weighted, learns in _products(
                weights, seen, part, unread_layers(facts) if part == "vision" else 0
            ):
                total += flops * (1 + learns * ((weighted and mode == "full") + reaches * (1 if weighted else 2)))
                reaches = reaches or mode != "frozen"
            if mode == "lora" and isinstance(config.adapter, LoraAdapter):
                rows = seen.tokens if part == "projector" else seen.positions
                total += 6.0 * rows * adapter_size(facts, weights, config.adapter)
    return total


def _weights(facts: ModelFacts, tower: Tower, part: str) -> list[Tensor]:
    """The matrices of a tower or of its projector, in order."""
    both = facts.model_type in IMAGE_FAMILIES
    return [
        one
        for one in facts.tower_tensors
        if part_of(one.name) == part
        and (not both or ("audio" in one.name) == (tower == "audio"))
        and len(one.shape) > 1
        and one.kind != "embedding"
        and one.name.endswith("weight")
    ]


def _products(weights: Sequence[Tensor], seen: _Seen, part: str, unread: int) -> Iterator[tuple[float, bool, bool]]:
    """Forward operations of each product, in order; whether it is one with weights (or attention's), and has gradients.

    A pooling head (SigLIP's) gives no token, but its keys and values are computed of all positions.
    """
    ahead = [one for one in weights if (not one.layers or part == "projector") and _HEAD not in one.name]
    for index, one in enumerate(ahead):
        merged = merges(one) or (index > 0 and len(one.shape) > 3)  # GLM-V's convolution after the layers
        rows = seen.tokens if merged else seen.units if index == 0 else seen.positions
        yield 2.0 * one.size * one.count * rows, True, True
    inside, images = [one for one in weights if one.layers and one not in ahead], len(seen.groups[-1])
    layers = max((one.count for one in inside), default=0)
    for layer in range(layers):
        own = [one for one in inside if layer < one.count]
        width = next((one.shape[0] // (3 if found[1] == "qkv" else 1) for one in own if (found := _values(one))), 0)
        groups = seen.groups[min(layer, len(seen.groups) - 1)]
        yield 2.0 * sum(one.size for one in own) * seen.positions, True, layer < layers - unread
        yield 4.0 * width * sum(n * n for n in groups), False, layer < layers - unread
    for one in weights:
        if _HEAD in one.name:
            rows = (2 * seen.positions + images) / 3 if one.name.endswith("in_proj_weight") else images
            yield 2.0 * one.size * rows, True, False


def _values(one: Tensor) -> re.Match[str] | None:
    return _VALUE.search(one.module)


def _seen(facts: ModelFacts, fed: Mapping[str, torch.Tensor]) -> Iterator[tuple[Tower, _Seen]]:
    if "pixel_values" in fed:
        vision = (facts.raw or {}).get("vision_config") or {}
        if vision.get("model_type") == "pixtral":
            yield "vision", _unpadded(facts, vision, fed["pixel_values"], fed["image_sizes"])
        else:
            yield "vision", _patches(facts, fed)
    heard = AUDIO_FAMILIES.get(facts.model_type)
    if heard is not None and heard.alone and "input_features" in fed:  # others are not counted
        yield "audio", _frames(facts, fed["input_features"], fed.get("feature_attention_mask"))


def _patches(facts: ModelFacts, fed: Mapping[str, torch.Tensor]) -> _Seen:
    pixels, grids, shapes = fed["pixel_values"], fed.get("image_grid_thw"), fed.get("spatial_shapes")
    vision: dict[str, Any] = (facts.raw or {}).get("vision_config") or {}
    if grids is None:
        side = vision.get("patch_size", 1)
        high, wide = (side, side) if isinstance(side, int) else side
        square = pixels.ndim >= 4
        count = (pixels.shape[-2] // high) * (pixels.shape[-1] // wide) if square else pixels.shape[-2]
        images = prod(pixels.shape[:-3] if square else pixels.shape[:-2])
        classes = sum(one.name.endswith(_CLASS) for one in facts.tower_tensors)
        groups = [[count + classes] * images]
    else:
        count, images, classes = len(pixels), 1, 0
        whole = [height * width for time, height, width in grids.tolist() for _ in range(time)]
        windows = list(chain.from_iterable(_windows(vision, height, width) * t for t, height, width in grids.tolist()))
        full = vision.get("fullatt_block_indexes")
        groups = [whole if full is None or layer in full else windows for layer in range(vision.get("depth", 1))]
    units = count * images
    merged = units if shapes is None else int(shapes.prod(1).sum())  # LFM2-VL pads the patches of an image
    return _Seen(units, units + classes * images, merged // patches_per_token(facts), groups)


def _unpadded(facts: ModelFacts, vision: Mapping[str, Any], pixels: torch.Tensor, sizes: torch.Tensor) -> _Seen:
    """Pixtral's tower: images are padded for the first product only; all patches are one masked sequence."""
    side = vision["patch_size"]
    units = len(pixels) * (pixels.shape[-2] // side) * (pixels.shape[-1] // side)
    count = sum((height // side) * (width // side) for height, width in sizes.tolist())
    return _Seen(units, count, count // patches_per_token(facts), [[count]])


def _windows(vision: Mapping[str, Any], height: int, width: int) -> list[int]:
    """Patches of each window of an image; Qwen2.5-VL cuts those at its right and lower edges."""
    merge = vision.get("spatial_merge_size", 1)
    side = max(1, vision.get("window_size", 0) // merge // vision.get("patch_size", 1)) * merge
    rows, columns = ([min(side, size - at) for at in range(0, size, side)] for size in (height, width))
    return [row * column for row in rows for column in columns]


def _frames(facts: ModelFacts, features: torch.Tensor, mask: torch.Tensor | None) -> _Seen:
    family = AUDIO_FAMILIES[facts.model_type]
    trimmed = mask if family.trimmed else None
    frames = [features.shape[-1]] * len(features) if trimmed is None else trimmed.sum(1).tolist()
    window = ((facts.raw or {}).get("audio_config") or {}).get("n_window")
    chunk = 2 * window if window else max(frames)
    groups = [_halved(min(chunk, count - at)) for count in frames for at in range(0, count, chunk)]
    tokens = sum(_halved(count) // 4 if family.rule == "whole" else (_halved(count) - 2) // 2 + 1 for count in frames)
    return _Seen(sum(frames), sum(groups), tokens, [groups])


def _halved(frames: int) -> int:
    """Frames after a convolution of stride 2."""
    return (frames - 1) // 2 + 1
