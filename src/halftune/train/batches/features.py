"""Frozen towers are computed once: what they make of each image and sound is kept in the cache.

Features are computed of each image or sound alone, and joined for a batch.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from halftune.config.facts.media import kept_kinds
from halftune.core.errors import DataError
from halftune.core.files import cache_dir
from halftune.core.log import get_logger
from halftune.core.processes import heartbeat
from halftune.data.media.feature_store import FeatureStore
from halftune.data.media.processor import MediaProcessor
from halftune.data.media.reference import BadMedia, MediaRef, unpack
from halftune.data.order.split import TokenizedSplit
from halftune.data.pipeline import PreparedData
from halftune.plan import Plan
from halftune.train.batches.feed import Feed
from halftune.train.batches.frozen_towers import MASK, FrozenTowers
from halftune.train.parallel.processes import sum_over_processes

log = get_logger(__name__)

_SAID_EVERY = 30.0  # seconds between two lines about the progress
_SPARE = 2  # times as much free space as features take


class FeatureProcessor(MediaProcessor):
    """A processor whose inputs are features of images and sounds.

    Args:
        processor: makes the inputs of what is not in the store.
        towers: compute the features.
        store: keeps them.
    """

    def __init__(self, processor: MediaProcessor, towers: FrozenTowers, store: FeatureStore) -> None:
        vars(self).update(vars(processor))
        self.processor, self.towers, self.store = processor, towers, store
        self.kinds = kept_kinds(processor.settings.model_type, processor.settings.kinds)

    def key(self, ref: MediaRef) -> str:
        """The key of an image or a sound, by its content and the size that an image is scaled to."""
        size = (ref.frames, ref.rate) if ref.is_audio else self.settings.fitted(ref.width, ref.height)
        return hashlib.sha256(f"{ref.digest} {size} {(ref.width, ref.height)}".encode()).hexdigest()

    def inputs(self, refs: Sequence[Sequence[MediaRef]]) -> dict[str, Tensor]:
        """As of ``MediaProcessor``, with features instead of pixels and spectrograms."""
        others = [[ref for ref in group if ref.kind not in self.kinds] for group in refs]
        made = self.processor.inputs(others) if any(others) else {}
        joined: dict[str, list[Tensor]] = {}
        for ref in (ref for ref in chain.from_iterable(refs) if ref.kind in self.kinds):
            for name, one in self.features(ref).items():
                joined.setdefault(name, []).append(one)
        return made | {name: _padded(one) if name == MASK else torch.cat(one) for name, one in joined.items()}

    def features(self, ref: MediaRef) -> dict[str, Tensor]:
        """The features of an image or a sound; those that are missing or damaged are computed again.

        Raises:
            BadMedia: it is damaged or changed.
        """
        if (found := self.store.read(self.key(ref))) is not None:
            return found
        log.info("computing the features of %s again", ref.path or "what is in a row")
        made = self.compute(ref)
        try:
            self.store.write(self.key(ref), made)
        except OSError as error:
            log.warning("features are not kept: %s", error)
        return made

    def compute(self, ref: MediaRef) -> dict[str, Tensor]:
        """Features on the CPU, with the small inputs of the forward pass."""
        inputs, audio = self.processor.inputs([[ref]]), self.processor.audio
        if not ref.is_audio or audio is None:
            return self.towers.see(inputs)
        return self.towers.hear(inputs, audio.token_id, audio.texts([ref])[0].count(audio.token))


def _padded(masks: Sequence[Tensor]) -> Tensor:
    """Masks ``[1, F]`` of sounds as ``[A, F]``, of the longest."""
    return pad_sequence([one[0] for one in masks], batch_first=True)


def with_features(feed: Feed, model: nn.Module, plan: Plan, data: PreparedData, accelerator: Accelerator) -> Feed:
    """A feed that reads features; the feed itself where they cannot be kept, which the log says.

    Each process computes its share of those that are not in the cache yet.

    Args:
        feed: makes pixels and spectrograms.
        model: as placed; the towers that it uses are frozen.
        plan: as final.
        data: whose images and sounds are computed.
        accelerator: the processes.

    Raises:
        DataError: an image or a sound is damaged or changed.
    """
    sure, processor = feed.config.data.cache_features is True, feed.images
    assert processor is not None
    if not sure and feed.total_steps() <= feed.steps_in(0) and feed.config.method.segments == 1:
        log.info("features are not kept: each image and sound is used once")
        return feed
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    towers = FrozenTowers(base, plan)
    made: FeatureProcessor | None = None
    why = towers.why_not(kept_kinds(processor.settings.model_type, processor.settings.kinds))
    if not why:
        made = FeatureProcessor(processor, towers, FeatureStore(cache_dir() / "features" / towers.identity(processor)))
        try:
            why = _fill(made, data, feed.rank, feed.world_size, sure=sure)
        except OSError as error:
            why = f"cannot write to {made.store.folder}: {error.strerror}"
    if why:
        log.warning("features are not kept: %s", why)
    if sum_over_processes(accelerator, [float(bool(why))])[0] or made is None:
        return feed
    towers.take_features(-1 if processor.audio is None else processor.audio.token_id)
    return replace(feed, images=made)


def _fill(made: FeatureProcessor, data: PreparedData, rank: int, of: int, *, sure: bool) -> str:
    """Why features are not kept, or "".

    Raises:
        DataError, OSError: an image or a sound, or the cache, cannot be used.
    """
    media, store = _media(made, data), made.store
    keys = sorted(media)[rank::of]
    missing = [key for key in keys if not store.has(key)]
    begun = said = time.monotonic()
    written = 0
    for done, key in enumerate(missing, start=1):
        split, index = media[key]
        ref = next(ref for ref in _refs(split, index) if made.key(ref) == key)
        try:
            written += store.write(key, made.compute(ref))
        except BadMedia as error:
            remedy = "correct or remove the row, or start the run again if the file is right"
            raise DataError(str(error), where=split.where([index]), remedy=remedy, code="data.bad_media") from error
        heartbeat.beat()
        needed = _SPARE * written // done * (len(missing) - done) * of
        if not sure and needed > (free := shutil.disk_usage(store.folder).free):
            return f"{store.folder} needs {needed / 2**30:.1f} GiB of free space and has {free / 2**30:.1f} GiB"
        if time.monotonic() - said > _SAID_EVERY:
            said = time.monotonic()
            log.info("features: %d of %d", done, len(missing))
    total = sum(store.path(key).stat().st_size for key in keys)
    seconds = time.monotonic() - begun
    computed = f"{len(missing)} computed in {seconds:.1f} s, which each later epoch saves" if missing else "all kept"
    log.info("features of %d images and sounds: %s, %.1f MiB in %s", len(keys), computed, total / 2**20, store.folder)
    return ""


def _media(made: FeatureProcessor, data: PreparedData) -> dict[str, tuple[TokenizedSplit, int]]:
    """Where each image and sound stands first, by its key."""
    found: dict[str, tuple[TokenizedSplit, int]] = {}
    for split in (data.train, data.eval):
        for index in range(len(split) if split is not None else 0):
            assert split is not None
            for ref in (ref for ref in _refs(split, index) if ref.kind in made.kinds):
                found.setdefault(made.key(ref), (split, index))
    return found


def _refs(split: TokenizedSplit, index: int) -> Iterator[MediaRef]:
    for segment in split.example(index).segments:
        yield from unpack(segment.media) if segment.media else ()
