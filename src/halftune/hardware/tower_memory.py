"""Memory of vision towers on one device: weights, and activations by the number of image patches.

Sizes come from the towers' own weights. All tokens of a micro-batch are taken for image tokens: the plan does not know
the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from halftune.config.facts.architecture import Tensor
from halftune.config.facts.media import part_of
from halftune.config.facts.model import ModelFacts

# Patches that become a token, by model type, where config.json does not say it; 4 for Qwen-VL, GLM-V and their kin.
_PATCHES = {"llava": 1, "llava_next": 1, "idefics3": 4, "smolvlm": 4}
_NORMS = 2  # of a layer, whose inputs are kept in fp32 and in the compute dtype


def patches_per_token(facts: ModelFacts) -> int:
    """Image patches of the tower that become one token of the language model."""
    raw = facts.raw or {}
    vision = raw.get("vision_config") or {}
    if pooled := raw.get("mm_tokens_per_image"):
        return max(1, (vision.get("image_size", 1) // vision.get("patch_size", 1)) ** 2 // pooled)
    sides = vision.get("spatial_merge_size") or vision.get("pooling_kernel_size") or raw.get("scale_factor")
    return int(sides) ** 2 if sides else _PATCHES.get(facts.model_type, 4)


def tower_activations(facts: ModelFacts, tokens: int, compute: int, *, trained: bool, checkpointing: bool) -> int:
    """Peak bytes of a vision tower's activations, pixels and features included.

    A frozen tower keeps nothing for a backward pass: one layer's tensors exist at a time.

    Args:
        facts: the model.
        tokens: image tokens of a micro-batch.
        compute: bytes per element of the compute dtype.
        trained: whether the tower or a projector has gradients.
        checkpointing: whether a trained tower's layers are recomputed.
    """
    vision = [one for one in facts.tower_tensors if part_of(one.name) != "audio"]
    layers, blocks = _repeated(vision)
    if not blocks:
        return 0
    patches = tokens * patches_per_token(facts)
    widths = [one.shape[1] for one in blocks]
    width = max(set(widths), key=widths.count)
    outputs = sum(one.shape[0] for one in blocks)
    layer = outputs * compute + _NORMS * width * (4 + compute)
    pixels = max((math.prod(one.shape[1:]) for one in vision if len(one.shape) >= 4), default=0)
    ends = pixels * (4 + compute) + 2 * width * compute
    kept = layer
    if trained:
        kept = layers * layer
        kept = min(kept, layers * width * compute + 2 * layer) if checkpointing else kept
    return patches * (kept + ends) + tokens * facts.hidden_size * compute


def _repeated(tensors: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """Number of layers, and the weights of linear layers that each of them has."""
    layers = max((len(one.layers) for one in tensors), default=0)
    return layers, [one for one in tensors if one.kind in ("linear", "conv1d") and len(one.layers) == layers > 0]
