"""A frozen vision tower is computed once: what it makes of each image is kept in the cache and handed to the model.

``mm_encoder_outputs`` of transformers' forward passes takes the output of ``get_image_features``. Its tensors are
computed of each image alone, and joined for a batch.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import PIL
import torch
import transformers
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor, nn

from halftune import __version__
from halftune.core.errors import DataError
from halftune.core.files import cache_dir
from halftune.core.log import get_logger
from halftune.core.processes import heartbeat
from halftune.data.media.feature_store import FeatureStore
from halftune.data.media.processor import MediaProcessor
from halftune.data.media.reference import BadMedia, MediaRef, unpack
from halftune.data.order.split import TokenizedSplit
from halftune.data.pipeline import PreparedData
from halftune.model.load.towers import towers_of
from halftune.plan import Plan
from halftune.precision.dtypes import autocast
from halftune.train.batches.feed import Feed
from halftune.train.parallel.processes import sum_over_processes

log = get_logger(__name__)

_PREFIX = "image_features."
_POOLED, _DEEP = f"{_PREFIX}pooled", f"{_PREFIX}deep."
_SPLIT = ".split"  # ends the names of features that are a list with an entry per image, not one tensor
_SMALL = ("image_grid_thw", "image_sizes")  # inputs besides pixels that the forward pass still needs
_SAID_EVERY = 30.0  # seconds between two lines about the progress
_SPARE = 2  # times as much free space as features take


class FeatureProcessor(MediaProcessor):
    """A processor whose inputs are features of images instead of pixels.

    Args:
        processor: makes the inputs of images that are not in the store, and of sounds.
        tower: computes their features.
        store: keeps them.
    """

    def __init__(self, processor: MediaProcessor, tower: VisionTower, store: FeatureStore) -> None:
        vars(self).update(vars(processor))
        self.processor, self.tower, self.store = processor, tower, store

    def key(self, ref: MediaRef) -> str:
        """The key of an image, by its content and the size that it is scaled to."""
        size = self.settings.fitted(ref.width, ref.height)
        return hashlib.sha256(f"{ref.digest} {size} {(ref.width, ref.height)}".encode()).hexdigest()

    def inputs(self, refs: Sequence[Sequence[MediaRef]]) -> dict[str, Tensor]:
        """As of ``MediaProcessor``, with features instead of pixels."""
        images = [ref for ref in chain.from_iterable(refs) if not ref.is_audio]
        heard = [[ref for ref in group if ref.is_audio] for group in refs]
        made = self.processor.inputs(heard) if any(heard) else {}
        found = [self.features(ref) for ref in images]
        return made | {name: torch.cat([one[name] for one in found]) for name in (found[0] if found else ())}

    def features(self, ref: MediaRef) -> dict[str, Tensor]:
        """The features of an image; those that are missing or damaged are computed again.

        Raises:
            BadMedia: the image is damaged or changed.
        """
        if (found := self.store.read(self.key(ref))) is not None:
            return found
        log.info("computing the features of %s again", ref.path or "the image in a row")
        made = self.compute(ref)
        try:
            self.store.write(self.key(ref), made)
        except OSError as error:
            log.warning("features are not kept: %s", error)
        return made

    def compute(self, ref: MediaRef) -> dict[str, Tensor]:
        """The features of an image, on the CPU, with the small inputs of the forward pass."""
        return self.tower(self.processor.inputs([[ref]]))


@dataclass(frozen=True)
class VisionTower:
    """The frozen tower of a model, with its projector.

    Attributes:
        model: the model in training, unwrapped.
        plan: gives the dtypes.
    """

    model: Any
    plan: Plan

    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Features of images, with the small inputs of the forward pass."""
        device = next(self.model.get_input_embeddings().parameters()).device
        with torch.no_grad(), autocast(self.plan.precision, device):
            made = self.model.get_image_features(**{name: one.to(device) for name, one in inputs.items()})
        deep = getattr(made, "deepstack_features", None) or ()
        named = {_POOLED: made.pooler_output, **{f"{_DEEP}{index}": one for index, one in enumerate(deep)}}
        joined = {
            name if isinstance(one, Tensor) else name + _SPLIT: one if isinstance(one, Tensor) else torch.cat(list(one))
            for name, one in named.items()
        }
        small = {name: one for name, one in inputs.items() if name in _SMALL}
        return {name: one.cpu() for name, one in (joined | small).items()}

    def why_not(self) -> str:
        """Why features cannot be kept; empty if they can."""
        if "mm_encoder_outputs" not in inspect.signature(type(self.model).forward).parameters:
            return f"transformers {transformers.__version__} takes no features of {self.model.config.model_type}"
        towers = towers_of(self.model)
        assert towers is not None
        for name, module in self.model.named_modules():
            drawn = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0)
            if name and towers.contain(name) and drawn:
                return f"{name} has dropout"
        return ""

    def identity(self, processor: MediaProcessor) -> str:
        """sha256 of all that features depend on besides the image."""
        towers, digest = towers_of(self.model), hashlib.sha256()
        assert towers is not None
        names = set(chain.from_iterable(towers.sources.values()))
        for name, tensor in towers.read():
            if name in names:
                heartbeat.beat(tensor.nbytes)
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        config = {key: one for key, one in self.model.config.to_dict().items() if "text" not in key}
        precision, device = self.plan.precision, next(self.model.parameters()).device.type
        made_with = {
            "halftune": __version__,
            "packages": (torch.__version__, transformers.__version__, PIL.__version__),
            "processor": (processor.settings.processor, processor.settings.model_type),
            "pixels": (processor.settings.min_pixels, processor.settings.max_pixels),
            "dtypes": (precision.storage.value, precision.compute.value, precision.autocast.value),
            "attention": [part.attention.value for part in self.plan.parts],
            "backend": asdict(self.plan.attention.softmax),
            "device": device,
            "config": config,
        }
        digest.update(json.dumps(made_with, sort_keys=True, default=str).encode())
        return digest.hexdigest()


def with_features(feed: Feed, model: nn.Module, plan: Plan, data: PreparedData, accelerator: Accelerator) -> Feed:
    """A feed that reads features of images; the feed itself where they cannot be kept, which the log says.

    Each process computes its share of those that are not in the cache yet.

    Args:
        feed: makes pixels.
        model: as placed; its vision tower is frozen.
        plan: as final.
        data: whose images are computed.
        accelerator: the processes.

    Raises:
        DataError: an image is damaged or changed.
    """
    sure, processor = feed.config.data.cache_features is True, feed.images
    assert processor is not None
    if not sure and feed.total_steps() <= feed.steps_in(0) and feed.config.method.segments == 1:
        log.info("image features are not kept: each image is seen once")
        return feed
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    tower = VisionTower(base, plan)
    made: FeatureProcessor | None = None
    why = tower.why_not()
    if not why:
        made = FeatureProcessor(processor, tower, FeatureStore(cache_dir() / "features" / tower.identity(processor)))
        try:
            why = _fill(made, data, feed.rank, feed.world_size, sure=sure)
        except OSError as error:
            why = f"cannot write to {made.store.folder}: {error.strerror}"
    if why:
        log.warning("image features are not kept: %s", why)
    if sum_over_processes(accelerator, [float(bool(why))])[0] or made is None:
        return feed
    base.register_forward_pre_hook(_as_outputs, with_kwargs=True)
    return replace(feed, images=made)


def _fill(made: FeatureProcessor, data: PreparedData, rank: int, of: int, *, sure: bool) -> str:
    """Why features are not kept, or "".

    Raises:
        DataError, OSError: an image, or the cache, cannot be used.
    """
    images, store = _images(made, data), made.store
    keys = sorted(images)[rank::of]
    missing = [key for key in keys if not store.has(key)]
    begun = said = time.monotonic()
    written = 0
    for done, key in enumerate(missing, start=1):
        split, index = images[key]
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
            log.info("image features: %d of %d", done, len(missing))
    total = sum(store.path(key).stat().st_size for key in keys)
    computed = f"{len(missing)} computed in {time.monotonic() - begun:.1f} s" if missing else "all in the cache"
    log.info("image features: %d images, %s, %.1f MiB in %s", len(keys), computed, total / 2**20, store.folder)
    return ""


def _images(made: FeatureProcessor, data: PreparedData) -> dict[str, tuple[TokenizedSplit, int]]:
    """Where each image stands first, by its key."""
    found: dict[str, tuple[TokenizedSplit, int]] = {}
    for split in (data.train, data.eval):
        for index in range(len(split) if split is not None else 0):
            assert split is not None
            for ref in _refs(split, index):
                found.setdefault(made.key(ref), (split, index))
    return found


def _refs(split: TokenizedSplit, index: int) -> Iterator[MediaRef]:
    for segment in split.example(index).segments:
        yield from (ref for ref in unpack(segment.media) if not ref.is_audio) if segment.media else ()


def _as_outputs(_model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hand features over as the output of the tower."""
    given = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith(_PREFIX)}
    if given:
        whole = {name.removesuffix(_SPLIT): [one] if name.endswith(_SPLIT) else one for name, one in given.items()}
        deep = [whole[f"{_DEEP}{index}"] for index in range(len(whole) - 1)]
        outputs = SimpleNamespace(pooler_output=whole[_POOLED], deepstack_features=deep)
        kwargs["mm_encoder_outputs"] = {"image": outputs}
    return args, kwargs
