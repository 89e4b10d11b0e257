"""Runs the towers of media that a batch lacks: processes gather sharded weights together, or wait for each other.

Each forward pass calls the towers equally often, in the same order. A batch without images gets an image of the data.
Its features enter the graph as an empty slice: they change no loss, and all gradients that they give are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedTokenizerBase

from halftune.config.facts.media import part_of
from halftune.data.media.inputs import prompt_inputs
from halftune.data.media.processor import MediaProcessor
from halftune.data.media.reference import MediaRef, pack, unpack
from halftune.data.pipeline import PreparedData
from halftune.model.load.towers import towers_of
from halftune.train.batches.frozen_towers import decoder_arguments

_INPUTS = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
_LOOKED_AT = 100  # media of a kind, of which the smallest is taken


def call_all_towers(
    model: nn.Module,
    images: MediaProcessor,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    device: torch.device,
) -> None:
    """From now on, each forward pass calls the towers of all media of the data; not while answers are generated.

    Args:
        model: as sharded.
        images: makes the inputs.
        tokenizer: has the placeholders.
        data: a kind of which it has no media is left out.
        device: of the inputs.

    Raises:
        DataError: an image, a video or a sound is damaged, or changed since it was tokenised.
    """
    prompts = {}
    for kind in images.settings.kinds:
        found = [*islice(_media(data, kind), _LOOKED_AT)]
        if found:
            ref, where = min(found, key=lambda one: len(images.texts([one[0]])[0]))
            prompts[kind] = {name: one.to(device) for name, one in _prompt(images, tokenizer, ref, where).items()}
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    absent = _Absent(base, prompts)
    base.register_forward_pre_hook(absent.begin, with_kwargs=True)
    base.get_decoder().register_forward_pre_hook(absent.end, with_kwargs=True)


def _media(data: PreparedData, kind: str) -> Iterator[tuple[MediaRef, str]]:
    """The media of a kind, and their rows."""
    for split in (data.train, data.eval):
        for index in range(len(split) if split is not None else 0):
            assert split is not None
            for segment in split.example(index).segments:
                for ref in unpack(segment.media) if segment.media else ():
                    if ref.kind == kind:
                        yield ref, split.where([index])


def _prompt(images: MediaProcessor, tokenizer: PreTrainedTokenizerBase, ref: MediaRef, where: str) -> dict[str, Tensor]:
    """The forward pass's arguments for the placeholders of an image, a video or a sound, and nothing else."""
    ids = tokenizer(images.texts([ref])[0], add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert isinstance(ids, Tensor)
    places = torch.arange(ids.shape[1])[None]
    inputs = prompt_inputs(images, [pack([ref])], where, ids)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": places, **inputs}


class _Absent:
    """Hooks of a forward pass.

    Args:
        model: in training, below its adapter.
        prompts: for each kind of media, the arguments for one of them.
    """

    def __init__(self, model: Any, prompts: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.model, self.prompts = model, prompts
        self.waiting: list[str] = []
        self.empty: list[Tensor] = []
        towers = towers_of(model)
        assert towers is not None
        # Modules of a model stand in the order in which they are called: Omni's audio tower before, Gemma's after.
        parts = [part_of(name) for name in towers.roots]
        first = next((part for part in parts if part != "projector"), "")
        self.early = [kind for kind in prompts if (kind == "audio") == (first == "audio")]

    def begin(self, _model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Call the first tower, if the batch has no media of it."""
        answers = kwargs.get("use_cache")
        absent = [kind for kind in self.prompts if not answers and kwargs.get(_INPUTS[kind]) is None]
        self.empty = [one for kind in absent if kind in self.early for one in self._called(kind)]
        self.waiting = [kind for kind in absent if kind not in self.early]

    def end(self, _decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Call the other towers that no medium has called, and add what is empty."""
        empty = self.empty + [one for kind in self.waiting for one in self._called(kind)]
        self.waiting, self.empty = [], []
        if empty:
            embedded = kwargs["inputs_embeds"]
            kwargs["inputs_embeds"] = embedded + torch.stack(empty).sum().to(embedded)
        return args, kwargs

    def _called(self, kind: str) -> list[Tensor]:
        """Zeros whose graph goes through the towers of a medium, not through the embeddings of its placeholders."""
        embedding = self.model.get_input_embeddings()
        with embedding.register_forward_hook(lambda _module, _inputs, output: output.detach()):
            made = decoder_arguments(self.model, partial(self.model.forward, **self.prompts[kind], use_cache=False))
        tensors = [one for one in pytree.tree_leaves(made) if isinstance(one, Tensor) and one.requires_grad]
        return [one.flatten()[:0].sum().float() for one in tensors]
