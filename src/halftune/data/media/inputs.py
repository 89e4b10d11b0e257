"""Adds the images of a batch to the arguments of its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

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
    """The batch with the images of its segments, decoded, as extras, and with the types of its tokens.

    Args:
        batch: of the segments, in order.
        segments: with references of images.
        images: makes the inputs.
        where: names the rows of segments, by their indices, for the error.

    Raises:
        DataError: an image is damaged, or changed since it was tokenised.
    """
    tokens = {**batch.tokens, **images.token_types(batch.tokens["input_ids"])}
    refs = [unpack(one.media) if one.media else () for one in segments]
    try:
        extras = images.inputs(refs) if any(refs) else {}
    except BadMedia as error:
        remedy = "correct or remove the row, or start the run again if the file is right"
        bad = [index for index, group in enumerate(refs) if not _usable(group, images)] or range(len(refs))
        raise DataError(str(error), where=where(bad), remedy=remedy, code="data.bad_media") from error
    if images.family.mrope and "seq_idx" in tokens:
        places = images.image_tokens(batch.tokens["input_ids"])
        tokens["position_ids"] = image_positions(batch, places, extras.get("image_grid_thw"), images.merge)
    return replace(batch, tokens=tokens, extras={**batch.extras, **extras})


def _usable(group: Sequence[MediaRef], images: MediaProcessor) -> bool:
    try:
        images.inputs([group])
    except BadMedia:
        return False
    return True


def image_positions(batch: Batch, image: Tensor, grids: Tensor | None, merge: int) -> Tensor:
    """Positions of a packed row: those of the text, which keep samples apart, then time, height and width (M-RoPE).

    In each sample, an image of h x w tokens begins at the next position p: its tokens have time p, height p + row and
    width p + column. The text after it begins at p + max(h, w) (Qwen2-VL, arXiv:2409.12191, section 2.1).

    Args:
        batch: packed.
        image: bool ``[1, T]``, True for image tokens.
        grids: int64 ``[I, 3]``: 1, height and width of each image in patches; None: no images.
        merge: patches of a token, along each side.

    Returns:
        int64 ``[4, 1, T]``.
    """
    text, owners = batch.tokens["position_ids"][0], batch.tokens["seq_idx"][0]
    bounds = batch.extras["cu_seq_lens_q"]
    assert isinstance(bounds, Tensor)
    ends, places = bounds[1:].tolist(), image[0].nonzero().squeeze(1).tolist()
    axes, shift, used = text.expand(3, -1).clone(), torch.zeros_like(text), 0
    for _, height, width in [] if grids is None else grids.tolist():
        rows, columns = height // merge, width // merge
        start, count = places[used], rows * columns
        end, used = start + count, used + count
        first = text[start] + shift[start]
        axes[0, start:end] = first
        axes[1, start:end] = first + torch.arange(rows).repeat_interleave(columns)
        axes[2, start:end] = first + torch.arange(columns).repeat(rows)
        shift[end : ends[int(owners[start])]] += max(rows, columns) - count
    axes = torch.where(image[0], axes, text + shift)
    return torch.cat([text[None], axes])[:, None]
