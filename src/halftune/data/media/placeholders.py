"""Rows with images as tokens: reads the row, opens the headers, and writes the placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from halftune.data.control_tokens import ControlTokens
from halftune.data.conversation import Record, RowDropped, RowError
from halftune.data.detect import Reading
from halftune.data.mask import Rendering
from halftune.data.media.processor import ImageProcessor, ImageSettings, expand
from halftune.data.media.reference import BadImage, pack, refer
from halftune.data.media.rows import read_row


class Placeholders:
    """Writes the placeholders of images into rendered conversations.

    Args:
        settings: how images become tokens.
        tokenizer, control: the tokenizer and its control tokens.

    Raises:
        DataError: the model's processor cannot be built.
    """

    def __init__(self, settings: ImageSettings, tokenizer: PreTrainedTokenizerBase, control: ControlTokens) -> None:
        self._settings, self._control = settings, control
        self._folder = Path(settings.folder) if settings.folder else None
        self._processor = ImageProcessor(settings, tokenizer)

    def read(self, reading: Reading, row: Mapping[str, Any]) -> Record:
        """The record of a row; see ``read_row``."""
        return read_row(reading, row)

    def expand(self, rendering: Rendering, images: Sequence[Any]) -> Rendering:
        """The rendering with placeholders, and the references of its images.

        Args:
            rendering: of a conversation.
            images: as in the row, in order.

        Raises:
            RowDropped: an image cannot be used, with ``data.on_bad_media: drop``.
            RowError: otherwise; or the chat template does not render the images.
        """
        try:
            refs = [refer(image, self._folder) for image in images]
            texts = [self._processor.text(ref) for ref in refs]
        except BadImage as error:
            if self._settings.on_bad == "drop":
                raise RowDropped("an image cannot be used") from error
            remedy = "correct or remove the row, or set data.on_bad_media: drop"
            raise RowError(str(error), remedy, "data.bad_media") from error
        made = expand(rendering, self._control, self._processor.token, texts, pack(refs))
        if made is None:
            what = f"the chat template does not write one {self._processor.token} for each image"
            raise RowError(what, "set model.chat_template to the model's own template", "data.image_count")
        return made
