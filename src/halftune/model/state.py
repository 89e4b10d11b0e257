"""The trainable parameters by name, bit for bit: what a checkpoint holds of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from halftune.core.errors import ModelError


def trainable_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter that requires a gradient, under its name, in its own dtype; tied ones once. Not copies."""
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_same(own: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Makes sure that a checkpoint's weights are this model's.

    Raises:
        ModelError: names or shapes are not exactly the model's.
    """
    remedy = "resume with the config that the checkpoint was made with"
    if strangers := sorted(own.keys() ^ shapes.keys()):
        what = f"{len(strangers)} trained weights are in the model or in the checkpoint only, first {strangers[0]}"
        raise ModelError(what, remedy=remedy)
    for name, shape in shapes.items():
        if tuple(own[name].shape) != tuple(shape):
            what = f"{name} is {tuple(shape)} in the checkpoint, {tuple(own[name].shape)} here"
            raise ModelError(what, remedy=remedy)


def load_trainable_state(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Puts ``trainable_state``'s tensors back, in place.

    Raises:
        ModelError: names, shapes or dtypes are not exactly the model's.
    """
    own = trainable_state(model)
    check_same(own, {name: tensor.shape for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if tensor.dtype != own[name].dtype:
            what = f"{name} is {tensor.dtype} in the checkpoint, {own[name].dtype} here"
            raise ModelError(what, remedy="resume with the config that the checkpoint was made with")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
