"""Rows with images, videos and sounds as tokens: reads the row, opens the headers, and writes the placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from halftune.data.formats.conversation import Record, RowDropped, RowError
from halftune.data.formats.detect import Reading
from halftune.data.media.processor import MediaProcessor, MediaSettings, expand
from halftune.data.media.reference import BadMedia, pack, path_of, places, refer, unpack
from halftune.data.media.rows import read_row
from halftune.data.templates.control_tokens import ControlTokens
from halftune.data.templates.loss_mask import Rendering


class Placeholders:
    """Writes the placeholders of images into rendered conversations.

    Args:
        settings: how images become tokens.
        tokenizer, control: the tokenizer and its control tokens.

    Raises:
        DataError: the model's processor cannot be built.
    """

    def __init__(self, settings: MediaSettings, tokenizer: PreTrainedTokenizerBase, control: ControlTokens) -> None:
        self._settings, self._control = settings, control
        self._folder = Path(settings.folder) if settings.folder else None
        self._processor = MediaProcessor(settings, tokenizer)

    def read(self, reading: Reading, row: Mapping[str, Any]) -> Record:
        """The record of a row; see ``read_row``."""
        return read_row(reading, row, self._settings.kinds, self._settings.on_bad)

    def places(self, renderings: Sequence[Rendering]) -> dict[str, list[Any]]:
        """The places of the media of a row; see ``reference.places``."""
        return places(ref.path for one in renderings if one.media for ref in unpack(one.media))

    def expand(self, rendering: Rendering, media: Sequence[tuple[str, Any]]) -> Rendering:
        """The rendering with placeholders, and the references of its media.

        Args:
            rendering: of a conversation.
            media: kinds and values as in the row, in order.

        Raises:
            RowDropped: an image cannot be used, with ``data.on_bad_media: drop``.
            RowError: otherwise; or the chat template does not render the images.
        """
        try:
            refs = [refer(value, self._folder, kind) for kind, value in media]
            texts = self._processor.texts(refs)
        except BadMedia as error:
            if self._settings.on_bad == "drop":
                files = places(path_of(value, self._folder) for _, value in media)
                raise RowDropped("an image, a video or a sound cannot be used", files) from error
            remedy = "correct or remove the row, or set data.on_bad_media: drop"
            raise RowError(str(error), remedy, "data.bad_media") from error
        tokens = [self._processor.token_of(ref) for ref in refs]
        made = expand(rendering, self._control, tokens, texts, pack(refs))
        if made is None:
            what = f"the chat template does not write {', '.join(tokens)} for the media of the row"
            raise RowError(what, "set model.chat_template to the model's own template", "data.image_count")
        return made
