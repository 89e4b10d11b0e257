"""Parts of a message of the OpenAI API: texts, images, videos and sounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halftune.core.errors import ModelError
from halftune.data.media.reference import MediaRef


def read_content(content: str | list[Any], media: Callable[..., MediaRef]) -> str | list[dict[str, Any]]:
    """A message's content of the OpenAI API, as :func:`~halftune.model.generate.conversation_inputs` takes it.

    Args:
        content: a text, or parts.
        media: makes the reference of a data URL, and of its ``kind``.

    Raises:
        ModelError: a part is of no known type, or its medium cannot be read.
    """
    return content if isinstance(content, str) else [_read_part(part, media) for part in content]


def _read_part(part: Any, media: Callable[..., MediaRef]) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith("data:"):
            return {"type": "image", "ref": media(url)}
        case {"type": "video_url", "video_url": {"url": str(url)}} if url.startswith("data:"):
            return {"type": "video", "ref": media(url, kind="video")}
        case {"type": "input_audio", "input_audio": {"data": str(data)}}:
            return {"type": "audio", "ref": media(f"data:;base64,{data}", kind="audio")}
    what = "a part of a message is neither a text, nor an image or video as a data URL, nor input_audio"
    raise ModelError(what, remedy="send parts of these types", code="infer.bad_request")
