"""What the frozen towers of a model make of images and sounds, and how the model takes it instead of them.

``mm_encoder_outputs`` of transformers' forward passes takes the output of ``get_image_features``. No forward pass takes
features of sounds: they are what the decoder gets at the places of their tokens.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import PIL
import torch
import transformers
from torch import Tensor, nn

from halftune import __version__
from halftune.core.optional import version_of
from halftune.core.processes import heartbeat
from halftune.data.media.processor import MediaProcessor
from halftune.data.pipeline import PACKAGE, code_of
from halftune.model.load.towers import towers_of
from halftune.plan import Plan
from halftune.precision.dtypes import autocast, torch_dtype

MASK = "feature_attention_mask"
_PREFIX = "image_features."
_POOLED, _DEEP = f"{_PREFIX}pooled", f"{_PREFIX}deep."
_SPLIT = ".split"  # ends the names of features that are a list with an entry per image, not one tensor
_HEARD = "audio_features"
_SMALL = ("image_grid_thw", "image_sizes", MASK)  # inputs that the forward pass needs besides features
_DROPOUT = ("p", "attention_dropout", "activation_dropout", "dropout", "layerdrop")  # probabilities in modules


class _Reached(Exception):
    """The decoder was called with the keyword arguments ``args[0]``."""


@dataclass(frozen=True)
class FrozenTowers:
    """The frozen towers of a model, with their projectors.

    Attributes:
        model: the model in training, unwrapped.
        plan: gives the dtypes.
    """

    model: Any
    plan: Plan

    def see(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Features of images, with the small inputs of the forward pass."""
        device = self._device()
        with torch.no_grad(), autocast(self.plan.precision, device):
            made = self.model.get_image_features(**{name: one.to(device) for name, one in inputs.items()})
        deep = getattr(made, "deepstack_features", None) or ()
        # Llama 4's forward pass projects the tower's output itself
        pooled = made.last_hidden_state if made.pooler_output is None else made.pooler_output
        named = {_POOLED: pooled, **{f"{_DEEP}{index}": one for index, one in enumerate(deep)}}
        joined = {
            name if isinstance(one, Tensor) else name + _SPLIT: one if isinstance(one, Tensor) else torch.cat(list(one))
            for name, one in named.items()
        }
        return _kept(joined, inputs)

    def hear(self, inputs: dict[str, Tensor], token: int, count: int) -> dict[str, Tensor]:
        """Features of a sound ``[count, H]``, with the small inputs: the embeddings of its tokens alone.

        They have the dtype of compute if it holds them exactly, else the embeddings' dtype.
        """
        device, ids = self._device(), torch.full((1, count), token)
        whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(count)[None]}
        given = {name: one.to(device) for name, one in (whole | inputs).items()}
        with torch.no_grad(), autocast(self.plan.precision, device):
            found = decoder_arguments(self.model, partial(self.model, **given, use_cache=False))["inputs_embeds"][0]
        narrow = found.to(torch_dtype(self.plan.precision.compute.value))
        return _kept({_HEARD: narrow if torch.equal(narrow.to(found.dtype), found) else found}, inputs)

    def _device(self) -> torch.device:
        return next(self.model.get_input_embeddings().parameters()).device

    def why_not(self, kinds: Sequence[str]) -> str:
        """Why features of these kinds of media cannot be kept; empty if they can."""
        if "image" in kinds and "mm_encoder_outputs" not in inspect.signature(type(self.model).forward).parameters:
            return f"transformers {transformers.__version__} takes no features of {self.model.config.model_type}"
        towers = towers_of(self.model)
        assert towers is not None
        for name, module in self.model.named_modules():
            given = (vars(module).get(one) for one in _DROPOUT)
            if name and towers.contain(name) and any(given):
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
            "code": code_of(PACKAGE / "media"),
            "packages": (torch.__version__, transformers.__version__, PIL.__version__, *_resizer(processor)),
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

    def take_features(self, token: int) -> None:
        """From now on, the model takes features as arguments of its forward pass.

        Args:
            token: id of the token of a sound; -1: none.
        """
        heard: dict[str, Tensor] = {}

        def take(_model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            heard.clear()
            if _HEARD in kwargs:
                heard.update(features=kwargs.pop(_HEARD), places=(kwargs["input_ids"] == token)[..., None])
            return _as_outputs(args, kwargs)

        def place(_decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if heard:
                embedded = kwargs["inputs_embeds"]
                kwargs["inputs_embeds"] = embedded.masked_scatter(heard["places"], heard["features"].to(embedded))
            return args, kwargs

        self.model.register_forward_pre_hook(take, with_kwargs=True)
        self.model.get_decoder().register_forward_pre_hook(place, with_kwargs=True)


def decoder_arguments(model: Any, forward: Callable[[], Any]) -> dict[str, Any]:
    """The keyword arguments that a forward pass calls the decoder with: the pass ends there.

    Args:
        model: a transformers model.
        forward: the pass.
    """
    hook = model.get_decoder().register_forward_pre_hook(_stop, with_kwargs=True, prepend=True)
    try:
        forward()
    except _Reached as reached:
        return reached.args[0]
    finally:
        hook.remove()
    raise AssertionError("the forward pass calls no decoder")


def _resizer(processor: MediaProcessor) -> tuple[str | None, ...]:
    """The version of torchvision where it makes pixels."""
    return (version_of("torchvision"),) if processor.family.torchvision else ()


def _stop(_decoder: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    raise _Reached(kwargs)


def _kept(features: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    small = {name: one for name, one in inputs.items() if name in _SMALL}
    return {name: one.cpu() for name, one in (features | small).items()}


def _as_outputs(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hand features of images over as the output of the tower."""
    given = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith(_PREFIX)}
    if given:
        whole = {name.removesuffix(_SPLIT): [one] if name.endswith(_SPLIT) else one for name, one in given.items()}
        deep = [whole[f"{_DEEP}{index}"] for index in range(len(whole) - 1)]
        pooled = whole[_POOLED]
        outputs = SimpleNamespace(pooler_output=pooled, last_hidden_state=pooled, deepstack_features=deep)
        kwargs["mm_encoder_outputs"] = {"image": outputs}
    return args, kwargs
