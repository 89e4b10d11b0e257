"""The trainable parameters by name, bit for bit: what a checkpoint holds of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from halftune.core.errors import ModelError


def trainable_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter that requires a gradient, under its name, in its own dtype; tied ones once. Not copies."""
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_trainable_state(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Puts ``trainable_state``'s tensors back, in place.

    Raises:
        ModelError: names, shapes or dtypes are not exactly the model's.
    """
    own = trainable_state(model)
    if strangers := sorted(own.keys() ^ tensors.keys()):
        what = f"{len(strangers)} trained weights are in the model or in the checkpoint only, first {strangers[0]}"
        raise ModelError(what, remedy="resume with the config that the checkpoint was made with")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            what = f"{name} is {tuple(tensor.shape)} {tensor.dtype} in the checkpoint"
            here = f"{tuple(own[name].shape)} {own[name].dtype} here"
            raise ModelError(f"{what}, {here}", remedy="resume with the config that the checkpoint was made with")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
