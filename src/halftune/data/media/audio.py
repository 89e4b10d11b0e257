"""The audio part of a model's own processor: placeholders of a sound by its length, and inputs of the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AutoFeatureExtractor, PreTrainedTokenizerBase

from halftune.config.facts.media import AUDIO_FAMILIES
from halftune.data.media.audio_tokens import RULES
from halftune.data.media.processor_class import build_processor
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
        self._family = family = AUDIO_FAMILIES[model_type]
        self._extractor: Any = AutoFeatureExtractor.from_pretrained(model, trust_remote_code=False)  # unset, it asks
        self._own = build_processor(Path(model), family.processor, tokenizer, feature_extractor=self._extractor)
        self._options = self._own._merge_kwargs(tokenizer_init_kwargs=tokenizer.init_kwargs)["audio_kwargs"]
        self._options |= {"return_tensors": "pt", "sampling_rate": self._extractor.sampling_rate}
        self.token: str = self._own.audio_token
        self.token_id: Any = tokenizer.convert_tokens_to_ids(self.token)
        own = family.seconds or _windows(self._own) * float(self._extractor.chunk_length)
        self._seconds = own if max_seconds is None else min(own, max_seconds)
        self._count(self._extractor.sampling_rate, 0)  # fails here if its numbers do not fit together

    def texts(self, refs: Sequence[MediaRef]) -> list[str]:
        """The texts that stand for the sounds of a conversation, in order.

        Raises:
            BadMedia: one is too short or too long, or there are more than the model's processor takes.
        """
        if self._family.single and len(refs) > 1:
            raise BadMedia(f"{len(refs)} sounds in a row; the model's processor takes one")
        rate = self._extractor.sampling_rate
        lengths = [resampled(ref.frames, ref.rate, rate) for ref in refs]
        return [self._text(ref, length, max(lengths)) for ref, length in zip(refs, lengths, strict=True)]

    def _text(self, ref: MediaRef, length: int, longest: int) -> str:
        name, seconds = ref.path or "the sound in the row", ref.frames / ref.rate
        if seconds > self._seconds:
            raise BadMedia(f"{name}: {seconds:.1f} s, more than {self._seconds:g}")
        count = self._count(length, longest)
        if count < 2:  # Qwen2-Audio takes one token alone for an older form of placeholder
            raise BadMedia(f"{name}: {seconds:.3f} s are too short for two tokens")
        bounds = [getattr(self._own, bound, bound) if bound else "" for bound in self._family.bounds]
        return (self.token * count).join(bounds or ("", ""))

    def _count(self, length: int, longest: int) -> int:
        return RULES[self._family.rule](self._extractor, length, longest)

    def inputs(self, groups: Sequence[Sequence[MediaRef]]) -> dict[str, torch.Tensor]:
        """The forward pass's arguments for the sounds of each conversation, in the order of their placeholders.

        The processor is called for each conversation, as in chat: features of a sound may depend on its neighbours'
        lengths.

        Returns:
            ``input_features`` ``[A, M, F]`` or ``[A, F, M]`` and its mask ``[A, F]``, padded with zeros; ``[W, M, F]``
            of all windows where there is no mask.

        Raises:
            BadMedia: a file is damaged or changed.
        """
        made = [self._features(group) for group in groups if group]
        return {name: _stacked([one[name] for one in made]) for name in made[0]}

    def _features(self, refs: Sequence[MediaRef]) -> dict[str, torch.Tensor]:
        waves = [_decoded(ref, self._extractor.sampling_rate) for ref in refs]
        if not self._family.mask:
            window = {
                "pad_to_multiple_of": self._extractor.n_samples,
                "max_source_positions": self._extractor.nb_max_frames,
            }
            return {"input_features": self._own._retrieve_input_features(waves, **{**self._options, **window})}
        found, _ = self._own._process_audio(waves, **self._options)
        features, mask = torch.as_tensor(found["input_features"]), torch.as_tensor(found[self._family.mask])
        if self._family.trimmed:  # the model removes what is masked
            longest = int(mask.sum(-1).max())
            features, mask = features[..., :longest], mask[:, :longest]
        return {"input_features": features, self._family.mask: mask}


def _windows(own: Any) -> int:
    """Windows of the feature extractor that a processor cuts sounds into; 1 if it does not."""
    return int(getattr(own, "max_audio_len", 0) // own.feature_extractor.chunk_length) or 1


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors ``[A, ...]`` in one, each padded with zeros to the largest."""
    sizes = [max(one.shape[axis] for one in parts) for axis in range(1, parts[0].dim())]
    widths = [[x for axis in reversed(range(1, one.dim())) for x in (0, sizes[axis - 1] - one.shape[axis])]
              for one in parts]  # fmt: skip
    return torch.cat([pad(one, width) for one, width in zip(parts, widths, strict=True)])


def _decoded(ref: MediaRef, rate: int) -> Any:
    try:
        return samples(read_content(ref), ref.frames, ref.rate, rate)
    except NotSound as error:
        raise BadMedia(f"{ref.path or 'the sound in the row'}: {error}") from error
