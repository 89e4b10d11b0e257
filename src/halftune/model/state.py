"""The trainable parameters by name, as saved in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from halftune.core.errors import ModelError


def trainable_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that require gradients, by name, in their own dtype; tied ones once. Not copied."""
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_same(own: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that a checkpoint's weights match the model.

    Raises:
        ModelError: names or shapes differ.
    """
    remedy = "resume with the config of the checkpoint"
    if differing := sorted(own.keys() ^ shapes.keys()):
        what = f"{len(differing)} trained weights are in either the model or the checkpoint only, first {differing[0]}"
        raise ModelError(what, remedy=remedy, code="train.checkpoint_mismatch")
    for name, shape in shapes.items():
        if tuple(own[name].shape) != tuple(shape):
            what = f"{name} is {tuple(shape)} in the checkpoint, {tuple(own[name].shape)} here"
            raise ModelError(what, remedy=remedy, code="train.checkpoint_mismatch")


def load_trainable_state(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the tensors of ``trainable_state`` in place.

    Raises:
        ModelError: names, shapes or dtypes differ.
    """
    own = trainable_state(model)
    check_same(own, {name: tensor.shape for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if tensor.dtype != own[name].dtype:
            what = f"{name} is {tensor.dtype} in the checkpoint, {own[name].dtype} here"
            raise ModelError(
                what,
                remedy="resume with the config of the checkpoint",
                code="train.checkpoint_mismatch",
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
