"""Adds the images of a batch to the arguments of its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from halftune.core.errors import DataError
from halftune.data.batch import Batch
from halftune.data.media.processor import ImageProcessor
from halftune.data.media.reference import BadImage, unpack
from halftune.data.store import Segment


def add_images(batch: Batch, segments: Sequence[Segment], images: ImageProcessor, where: str) -> Batch:
    """The batch with the images of its segments, decoded, as extras, and with the types of its tokens.

    Args:
        batch: of the segments, in order.
        segments: with references of images.
        images: makes the inputs.
        where: the rows, for the error.

    Raises:
        DataError: an image is damaged, or changed since it was tokenised.
    """
    tokens = {**batch.tokens, **images.token_types(batch.tokens["input_ids"])}
    refs = [unpack(one.media) if one.media else () for one in segments]
    if not any(refs):
        return replace(batch, tokens=tokens)
    try:
        extras = images.inputs(refs)
    except BadImage as error:
        remedy = "correct or remove the row, or start the run again if the file is right"
        raise DataError(str(error), where=where, remedy=remedy, code="data.bad_media") from error
    return replace(batch, tokens=tokens, extras={**batch.extras, **extras})
