"""Recipes with audio: which models are known by name, and what is the same there."""

from __future__ import annotations

import re
from typing import Any

from halftune.config.facts.media import AUDIO_FAMILIES, IMAGE_FAMILIES, VIDEO_FAMILIES
from halftune.convert import images
from halftune.convert.draft import Draft, is_off, table

MISTRAL = "tokenizer_use_mistral_common"
RATE = 16_000  # samples per second, of all feature extractors of ``AUDIO_FAMILIES``


def find_media(model: Any) -> set[str]:
    """What a model with this name takes of ``images``, ``videos`` and ``audios``; empty where it is not known."""
    for ours in ("audio", "images"):  # omni models are in both
        for pattern, kind in table("media", ours).items():
            if re.search(pattern, str(model), re.IGNORECASE):
                tables = {"images": IMAGE_FAMILIES, "videos": VIDEO_FAMILIES, "audios": AUDIO_FAMILIES}
                return {name for name, families in tables.items() if kind in families}
    return set()


def of_axolotl(draft: Draft, method: str) -> None:
    """``processor_type`` of a model that hears; parts are trained unless a key freezes them or LoRA leaves them out."""
    key, media = "processor_type", find_media(draft.get("model.name_or_path"))
    if is_off(draft.left.get(key)) or method or "audios" not in media:
        return
    if "images" in media:
        draft.put("data.images", True)
    how, why = images.towers_of_axolotl(draft), "layers of the towers stay as they are"
    draft.translated(key, "data.audio", True, changed=f"{why}{images.ADAPTED}" if how == "some" else "")
    if how in ("full", "lora"):
        towers = ("audio", "projector", *(["vision"] if "images" in media else []))
        draft.put("model.train", dict.fromkeys(towers, how))
    draft.drop("skip_prepare_dataset", "rows with audio are tokenised before training, too")
    if "voxtral" in str(draft.get("model.name_or_path")).lower() and draft.left.get(MISTRAL):
        draft.translated(MISTRAL, "model.chat_template", "voxtral")
        draft.put("model.chat_template_kwargs", {"trim_answers": True})


def rate(draft: Draft) -> None:
    """LLaMA-Factory's ``audio_sampling_rate``."""
    key = "audio_sampling_rate"
    if draft.left.get(key) in (None, RATE):
        draft.drop(key, "the rate of the model's own feature extractor")
    else:
        draft.changed(key, "", None, f"the model's own feature extractor takes {RATE:,} samples per second")
