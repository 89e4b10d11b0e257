"""A model's own feature extractor: the placeholders of a sound by its length, and the inputs of the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoFeatureExtractor, PreTrainedTokenizerBase

from halftune.config.facts.media import AUDIO_FAMILIES
from halftune.data.media.reference import BadMedia, MediaRef, read_content
from halftune.data.media.sound import NotSound, resampled, samples


class AudioProcessor:
    """The audio part of a model's processor.

    Args:
        model: folder with its files.
        model_type: key of ``AUDIO_FAMILIES``.
        tokenizer: has the placeholder's token.
        max_seconds: the longest sound; the model's own limit if None or larger.
    """

    def __init__(
        self, model: str, model_type: str, tokenizer: PreTrainedTokenizerBase, max_seconds: float | None
    ) -> None:
        self._family = AUDIO_FAMILIES[model_type]
        self._own: Any = AutoFeatureExtractor.from_pretrained(model, trust_remote_code=False)  # unset, it asks
        self.token: str = getattr(tokenizer, "audio_token", None) or "<|AUDIO|>"
        self.token_id: Any = tokenizer.convert_tokens_to_ids(self.token)
        own = float(self._own.chunk_length)
        self._seconds = own if max_seconds is None else min(own, max_seconds)

    def text(self, ref: MediaRef) -> str:
        """The text that stands for a sound.

        Raises:
            BadMedia: too short or too long.
        """
        name, seconds = ref.path or "the sound in the row", ref.frames / ref.rate
        if seconds > self._seconds:
            raise BadMedia(f"{name}: {seconds:.1f} s, more than {self._seconds:g}")
        length = resampled(ref.frames, ref.rate, self._own.sampling_rate)
        features = min(-(-length // self._own.hop_length), self._own.nb_max_frames)
        count = ((features - 1) // 2 + 1 - 2) // 2 + 1
        if count < 2:  # Qwen2-Audio takes one token alone for an older form of placeholder
            raise BadMedia(f"{name}: {seconds:.3f} s are too short for two tokens")
        return self.token * count

    def inputs(self, refs: Sequence[MediaRef]) -> dict[str, torch.Tensor]:
        """``input_features`` ``[A, M, F]`` and ``feature_attention_mask`` ``[A, F]`` of sounds, in order.

        Raises:
            BadMedia: a file is damaged or changed.
        """
        rate = self._own.sampling_rate
        waves = [_decoded(ref, rate) for ref in refs]
        made = self._own(
            waves, sampling_rate=rate, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        features, mask = made["input_features"], made["attention_mask"]
        if not self._family.padded:  # the model removes what is masked
            longest = int(mask.sum(-1).max())
            features, mask = features[..., :longest], mask[:, :longest]
        return {"input_features": features, "feature_attention_mask": mask}


def _decoded(ref: MediaRef, rate: int) -> Any:
    try:
        return samples(read_content(ref), ref.frames, ref.rate, rate)
    except NotSound as error:
        raise BadMedia(f"{ref.path or 'the sound in the row'}: {error}") from error
