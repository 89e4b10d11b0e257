"""Adds the media of a batch to the arguments of its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halftune.core.errors import DataError
from halftune.data.batch import Batch
from halftune.data.media.processor import MediaProcessor
from halftune.data.media.reference import BadMedia, MediaRef, unpack
from halftune.data.store import Segment


def add_media(
    batch: Batch, segments: Sequence[Segment], images: MediaProcessor, where: Callable[[Sequence[int]], str]
) -> Batch:
    """The batch with the media of its segments, decoded, as extras, and with the types of its tokens.

    Args:
        batch: of the segments, in order.
        segments: with references of media.
        images: makes the inputs.
        where: names the rows of segments, by their indices, for the error.

    Raises:
        DataError: a file is damaged, or changed since it was tokenised.
    """
    tokens = {**batch.tokens, **images.token_types(batch.tokens["input_ids"])}
    extras = _inputs(images.inputs, [one.media for one in segments], where)
    if images.family.mrope and "seq_idx" in tokens:
        kinds = images.media_tokens(batch.tokens["input_ids"])
        tokens["position_ids"] = media_positions(batch, kinds, _grids(extras, images), images.merge)
    return replace(batch, tokens=tokens, extras={**batch.extras, **extras}, of_media=True)


def prompt_inputs(images: MediaProcessor, media: Sequence[bytes], where: str, ids: Tensor) -> dict[str, Tensor]:
    """What ``generate`` takes besides the token ids of prompts.

    Args:
        images: makes the inputs; pixels also where it keeps features, which ``generate`` does not take.
        media: references of each prompt, as of ``Segment.media``.
        where: the rows, for the error.
        ids: int64 ``[N, T]``, padded.

    Raises:
        DataError: as ``add_media``.
    """
    pixels = partial(MediaProcessor.inputs, images)
    return {**images.token_types(ids), **_inputs(pixels, media, lambda _: where)}


def _inputs(
    make: Callable[[list[tuple[MediaRef, ...]]], dict[str, Tensor]],
    media: Sequence[bytes],
    where: Callable[[Sequence[int]], str],
) -> dict[str, Tensor]:
    refs = [unpack(one) if one else () for one in media]
    try:
        return make(refs) if any(refs) else {}
    except BadMedia as error:
        remedy = "correct or remove the row, or start the run again if the file is right"
        bad = [index for index, group in enumerate(refs) if not _usable(group, make)] or range(len(refs))
        raise DataError(str(error), where=where(bad), remedy=remedy, code="data.bad_media") from error


def _usable(group: tuple[MediaRef, ...], make: Callable[[list[tuple[MediaRef, ...]]], Any]) -> bool:
    try:
        make([group])
    except BadMedia:
        return False
    return True


@dataclass(frozen=True)
class Grid:
    """Patches of an image or a video.

    Attributes:
        time, height, width: their numbers.
        interval: positions between two of them in time.
        runs_on: the text behind begins after the last position in time, too.
    """

    time: int
    height: int
    width: int
    interval: Tensor | int = 1
    runs_on: bool = False


def _grids(extras: dict[str, Tensor], images: MediaProcessor) -> dict[int, list[Grid]]:
    """Grids by the type of their tokens; those of each pair of a video's frames, if its text has times."""
    still, moving = (extras.get(f"{kind}_grid_thw", torch.empty(0)).tolist() for kind in ("image", "video"))
    found = {1: [Grid(*one) for one in still], 2: list[Grid]()}
    if images.video is None:
        return found
    family, ones = images.video.family, torch.ones(len(moving))
    apart = extras.get(family.seconds, ones) * images.video.interval
    for (time, height, width), interval in zip(moving, apart, strict=True):
        if family.split:
            found[2] += [Grid(1, height, width)] * time
        else:
            found[2].append(Grid(time, height, width, interval, family.runs_on))
    return found


def media_positions(batch: Batch, kinds: Tensor, grids: Mapping[int, Sequence[Grid]], merge: int) -> Tensor:
    """Positions of a packed row: those of the text, which keep samples apart, then time, height and width (M-RoPE).

    In each sample, an image of h x w tokens begins at the next position p: its tokens have time p, height p + row and
    width p + column. The text after it begins at p + max(h, w) (Qwen2-VL, arXiv:2409.12191, section 2.1). Frame t of a
    video has time p + floor(t · interval) (Qwen2.5-VL, arXiv:2502.13923, section 2.1.2).

    Args:
        batch: packed.
        kinds: int64 ``[1, T]``: 1 for image tokens, 2 for video tokens, else 0.
        grids: of each image (1) and video (2), in order.
        merge: patches of a token, along each side.

    Returns:
        int64 ``[4, 1, T]``.
    """
    text, owners = batch.tokens["position_ids"][0], batch.tokens["seq_idx"][0]
    bounds = batch.extras["cu_seq_lens_q"]
    assert isinstance(bounds, Tensor)
    ends, kind_of = bounds[1:].tolist(), kinds[0].tolist()
    axes, shift = text.expand(3, -1).clone(), torch.zeros_like(text)
    waiting, start = {kind: iter(some) for kind, some in grids.items()}, 0
    while start < len(kind_of):
        if not kind_of[start]:
            start += 1
            continue
        grid = next(waiting[kind_of[start]])
        rows, columns = grid.height // merge, grid.width // merge
        places, size = torch.arange(grid.time * rows * columns), rows * columns
        end, first = start + len(places), text[start] + shift[start]
        time = (places // size * grid.interval).long()
        axes[0, start:end] = first + time
        axes[1, start:end] = first + places % size // columns
        axes[2, start:end] = first + places % columns
        longest = max(rows, columns, int(time[-1]) + 1 if grid.runs_on else 0)
        shift[end : ends[int(owners[start])]] += longest - len(places)
        start = end
    axes = torch.where(kinds[0] > 0, axes, text + shift)
    return torch.cat([text[None], axes])[:, None]
