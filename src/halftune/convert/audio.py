"""Recipes with audio: which models are known by name, and what is the same there."""

from __future__ import annotations

import re
from typing import Any

from halftune.config.facts.media import IMAGE_FAMILIES
from halftune.convert import images
from halftune.convert.draft import Draft, is_off, table

RATE = 16_000  # samples per second, of all feature extractors of ``AUDIO_FAMILIES``


def find_media(model: Any) -> set[str]:
    """What a model with this name takes of ``images`` and ``audios``; empty where the name is not known."""
    for pattern, kind in table("media", "audio").items():
        if re.search(pattern, str(model), re.IGNORECASE):
            return {"audios"} | ({"images"} if kind in IMAGE_FAMILIES else set())
    return {"images"} if images.find_family(model) is not None else set()


def of_axolotl(draft: Draft, method: str) -> None:
    """``processor_type`` of a model that hears; parts are trained unless a key freezes them or LoRA leaves them out."""
    key, media = "processor_type", find_media(draft.get("model.name_or_path"))
    if is_off(draft.left.get(key)) or method or "audios" not in media:
        return
    if "images" in media:
        draft.put("data.images", True)
    how = images.towers_of_axolotl(draft)
    if how == "some":
        why = "layers of the towers stay as they are; there, those with the same names are adapted"
        draft.changed(key, "data.audio", True, why)
    else:
        draft.translated(key, "data.audio", True)
        if how:
            towers = ("audio", "projector", *(["vision"] if "images" in media else []))
            draft.put("model.train", dict.fromkeys(towers, how))
    draft.drop("skip_prepare_dataset", "rows with audio are tokenised before training, too")


def rate(draft: Draft) -> None:
    """LLaMA-Factory's ``audio_sampling_rate``, and settings that only videos have."""
    key = "audio_sampling_rate"
    if draft.left.get(key) in (None, RATE):
        draft.drop(key, "the rate of the model's own feature extractor")
    else:
        draft.changed(key, "", None, f"the model's own feature extractor takes {RATE:,} samples per second")
    draft.drop("use_audio_in_video", "no source has videos")
