"""Prompts of ``logging.sample_prompts`` with their images, videos and sounds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halftune.config.run import RunConfig
from halftune.core.errors import DataError
from halftune.data.media.reference import BadMedia, MediaRef, refer
from halftune.data.media.rows import MARKERS

WHERE = "logging.sample_media"
Content = str | list[dict[str, Any]]


def prompt_contents(config: RunConfig) -> list[Content]:
    """The content of each prompt's message; each of its markers takes the next file.

    Without files, markers are text.

    Raises:
        DataError: not as many files as markers, a kind that is not trained, or a file that cannot be used.
    """
    prompts, files = config.logging.sample_prompts, config.logging.sample_media
    if not files:
        return list(prompts)
    markers = sum(len(re.findall("|".join(MARKERS), prompt)) for prompt in prompts)
    if markers != len(files):
        what = f"{markers} markers ({', '.join(MARKERS)}) in logging.sample_prompts for {len(files)} files"
        raise DataError(what, where=WHERE, remedy="name one file for each marker", code="data.image_count")
    waiting = iter(files)
    return [_content(prompt, waiting, config.data.media) for prompt in prompts]


def _content(prompt: str, files: Iterator[str], kinds: tuple[str, ...]) -> Content:
    parts: list[dict[str, Any]] = []
    for piece in re.split(f"({'|'.join(MARKERS)})", prompt):
        if piece in MARKERS:
            parts.append({"type": MARKERS[piece], "ref": _ref(next(files), MARKERS[piece], kinds)})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts if any("ref" in part for part in parts) else prompt


def _ref(given: str, kind: str, kinds: tuple[str, ...]) -> MediaRef:
    if kind not in kinds:
        what, remedy = f"this run is not trained with {kind}", "remove the marker and the file"
        raise DataError(what, where=WHERE, remedy=remedy, code="data.media_unsupported")
    file = Path(given).expanduser().absolute()
    try:
        return refer(file.name, file.parent, kind)
    except BadMedia as error:
        raise DataError(str(error), where=WHERE, remedy="use another file", code="data.bad_media") from error
