"""Memory of vision and audio towers on one device, by the number of patches and frames.

Sizes come from the towers' own weights. What a layer keeps for its backward pass is added up per operation, as in
transformers' layers. All tokens of a micro-batch are taken for tokens of images, or of sounds of full length: the plan
does not know the data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halftune.config.facts.architecture import Tensor
from halftune.config.facts.media import AUDIO_FAMILIES, IMAGE_FAMILIES, TOWERS_WITH_BOUNDS, part_of
from halftune.config.facts.model import ModelFacts

# Patches that become a token, by model type, where config.json does not say it; 4 for Qwen-VL, GLM-V and their kin.
_PATCHES = {"llava": 1, "llava_next": 1, "idefics3": 4, "smolvlm": 4}
_FRAMES = 2  # of a spectrogram for a position of an audio encoder's layers
_POSITIONS = {"merged": 4, "whole": 4}  # of these layers for a token, by the family's rule; else a pair is pooled
_QUICK_GELU = ("clip_vision_model", "qwen2_vl")  # model types whose default it is; its three tensors are kept
_QUERIES = re.compile(r"\.(q|k|v|q_proj|k_proj|v_proj|qkv)(\.linear)?$")


@dataclass(frozen=True)
class TowerMemory:
    """Bytes of a tower's activations.

    Attributes:
        held: what exists while the language model runs: the inputs, the features, and what is kept for backward.
        peak: the most, while the tower itself runs forward or backward.
    """

    held: int
    peak: int


@dataclass(frozen=True)
class _Layer:
    """Bytes per position that one layer keeps for its backward pass, and those of a forward pass that keeps nothing."""

    kept: float
    passing: float
    more: float


def patches_per_token(facts: ModelFacts) -> int:
    """Image patches of the tower that become one token of the language model."""
    raw = facts.raw or {}
    vision = raw.get("vision_config") or {}
    if pooled := raw.get("mm_tokens_per_image"):
        return max(1, (vision.get("image_size", 1) // vision.get("patch_size", 1)) ** 2 // pooled)
    if facts.model_type == "gemma4_unified":
        return 1  # its processor merges patches
    names = ("spatial_merge_size", "pooling_kernel_size", "scale_factor", "downsample_factor")
    sides = next(filter(None, map((raw | vision).get, names)), None)
    return int(sides) ** 2 if sides else _PATCHES.get(facts.model_type, 4)


def unread_layers(facts: ModelFacts) -> int:
    """Number of a vision tower's last layers that no token is made of: LLaVA reads the layer before the last."""
    layer = (facts.raw or {}).get("vision_feature_layer")
    return max(0, -layer - 1) if isinstance(layer, int) else 0


def tower_weights(facts: ModelFacts, shards: int, *, offload: bool = False, regather: bool = True) -> int:
    """Number of weights of towers on one device; under fsdp2 its shard, and what is gathered at a time.

    That is two layers (prefetch), and what lies around the layers, for the whole step.

    Args:
        facts: the model.
        shards: processes that share the weights; 1: each has all.
        offload: whether shards are in main memory.
        regather: whether layers are resharded after forward.
    """
    if shards == 1:
        return facts.tower_parameters
    layers = [one for one in facts.tower_tensors if one.layers and part_of(one.name) != "projector"]
    freed = sum(one.size * max(0, one.count - 2) for one in layers) if regather else 0
    return (0 if offload else -(-facts.tower_parameters // shards)) + facts.tower_parameters - freed


def tower_memory(
    facts: ModelFacts, tokens: int, compute: int, kinds: Sequence[str], *, mode: str, checkpointing: bool
) -> TowerMemory:
    """The memory of the tower that takes most, if all tokens are its own.

    A frozen tower keeps nothing for a backward pass: one layer's tensors exist at a time.

    Args:
        facts: the model.
        tokens: tokens of a micro-batch.
        compute: bytes per element of the compute dtype.
        kinds: of media: ``image``, ``video``, ``audio``; a patch of a video has the cost of an image's.
        mode: what is trained: nothing (``frozen``), ``projector`` alone, or the encoder by ``lora`` or in ``full``.
        checkpointing: whether a trained tower's layers are recomputed.
    """
    parts = dict.fromkeys("image" if kind == "video" else kind for kind in kinds)
    found = [_of_kind(facts, tokens, compute, kind, mode, checkpointing) for kind in parts]
    return max(found, key=lambda one: (one.peak, one.held), default=TowerMemory(0, 0))


def _of_kind(facts: ModelFacts, tokens: int, compute: int, kind: str, mode: str, checkpointing: bool) -> TowerMemory:
    own = [one for one in facts.tower_tensors if _of_tower(facts, one, kind)]
    encoder = [one for one in own if part_of(one.name) != "projector"]
    layers = max((len(one.layers) for one in encoder), default=0)
    inside = [one for one in encoder if len(one.layers) == layers > 0]
    if not inside:
        return _embedder(facts, own, tokens, compute, trained=mode != "frozen")
    audio = kind == "audio"
    each = _POSITIONS.get(AUDIO_FAMILIES[facts.model_type].rule, 2) if audio else patches_per_token(facts)
    positions = tokens * each
    inputs, width = _inputs(encoder, audio), _width(inside)
    layer = _layer(facts, inside, width, compute, kind, mode)
    merging = [one for one in own if one.kind == "linear" and merges(one)]
    hidden = [one.shape[0] for one in merging][:-1]
    ends = 2.5 * width * positions + 2 * sum(hidden) * tokens  # the last norm, and the projector
    if mode == "full" and audio:
        ends += 5 * width * positions  # around the convolutions
    elif mode == "full" and any(".patch_embedding.linear." in one.name for one in encoder):
        ends += inputs * positions  # Llama 4 copies pixels into patches, the input of its first product
    fed = positions * inputs * 4 + (positions * inputs * compute if compute < 4 else 0)
    features = tokens * facts.hidden_size * compute
    if mode in ("frozen", "projector"):
        held = fed + features + (ends * compute if mode == "projector" else 0)
        return TowerMemory(round(held), round(held + positions * layer.passing))
    each, unread = width * compute if checkpointing else layer.kept, 0 if audio else unread_layers(facts)
    held = fed + features + positions * (layers - unread) * each + ends * compute
    # Half of its gradients take the place of tensors of a layer that is computed again.
    more = layer.kept + layer.more / 2 if checkpointing else layer.more
    return TowerMemory(round(held), round(held + positions * (unread * each + more)))


def _embedder(facts: ModelFacts, own: Sequence[Tensor], tokens: int, compute: int, *, trained: bool) -> TowerMemory:
    """Of Gemma 4 without an encoder: norms and products between patches, or pieces of sound, and tokens."""
    products = [one for one in own if one.kind == "linear"]
    if not products:
        return TowerMemory(0, 0)
    inputs, width = products[0].shape[1], products[-1].shape[1]
    held = tokens * (inputs * (4 if compute == 4 else 4 + compute) + facts.hidden_size * compute)
    passing = tokens * compute * (inputs + width)
    if trained:
        held += tokens * compute * (inputs + 4 * width)
        passing += tokens * compute * 2 * width
    return TowerMemory(held, held + passing)


def _of_tower(facts: ModelFacts, one: Tensor, kind: str) -> bool:
    """Whether a weight belongs to the tower of a kind of media, or to its projector."""
    if facts.model_type not in IMAGE_FAMILIES or facts.model_type not in AUDIO_FAMILIES:
        return True  # there is one tower
    return ("audio" in one.name) == (kind == "audio")


def merges(one: Tensor) -> bool:
    """Whether a weight's inputs are tokens, and not patches or frames: the projector's, Llama 4's adapter's."""
    return part_of(one.name) == "projector" or ".vision_adapter." in one.name


def _inputs(encoder: Sequence[Tensor], audio: bool) -> int:
    """Numbers that a position is made of: pixels of a patch, or two frames of a spectrogram."""
    outside = [one for one in encoder if not one.layers and one.kind != "embedding"]
    first = next((one for one in outside if len(one.shape) > (2 if audio else 3)), None)
    if first is None and not audio:
        first = next((one for one in outside if one.kind == "linear"), None)
    return 0 if first is None else _FRAMES * first.shape[1] if audio else math.prod(first.shape[1:])


def _width(inside: Sequence[Tensor]) -> int:
    widths = [one.shape[1] for one in inside if one.kind in ("linear", "conv1d")]
    return max(set(widths), key=widths.count)


def _layer(facts: ModelFacts, inside: Sequence[Tensor], width: int, compute: int, kind: str, mode: str) -> _Layer:
    """What a layer keeps: the inputs and outputs of its norms, queries to outputs of attention, the feed-forward."""
    linear = [one for one in inside if one.kind in ("linear", "conv1d")]
    queries = sum(one.shape[0] for one in linear if _QUERIES.search(one.module))
    fused = any("qkv" in one.module for one in linear)
    gated = any("gate_proj" in one.name for one in linear)
    wide = max(one.shape[0] for one in linear if not _QUERIES.search(one.module))
    biased = {one.module for one in inside if one.name.endswith(".bias")}
    rms = sum(1 for one in inside if one.shape == (width,) and one.name.endswith("weight") and one.module not in biased)
    bounds = facts.model_type in TOWERS_WITH_BOUNDS
    # Rotated queries and keys are copies; where one product makes all three, it stays as the values are a view of it.
    turned = 2 * queries / 3 if bounds and fused and kind == "image" else 0
    attention = queries + turned + width * (2 if bounds else 1)  # joined from those between bounds
    activation = 3 if _activation(facts, kind) == "quick_gelu" else 2
    norms = 2 * width * ((2 * compute) if not rms else 4 + compute * (2 if mode == "full" else 1))
    feed_forward = (4 if gated else activation) * wide
    kept = norms + (attention + feed_forward) * compute
    more = (width + wide * (activation - 1 if not gated else 1)) * compute
    passing = (4 * width + (3 if gated else activation) * wide + (width if kind == "audio" else 0)) * compute
    return _Layer(kept, passing, more)


def _activation(facts: ModelFacts, kind: str) -> str:
    tower: dict[str, Any] = (facts.raw or {}).get("audio_config" if kind == "audio" else "vision_config") or {}
    usual = "quick_gelu" if {facts.model_type, tower.get("model_type")} & set(_QUICK_GELU) and kind == "image" else ""
    return tower.get("hidden_act") or usual
