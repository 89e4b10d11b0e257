"""Checkpoints to go on from: safetensors and JSON, valid only under the manifest that is written last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from halftune.core.atomic import first_aid, whole_folder
from halftune.core.errors import TrainingError
from halftune.core.manifest import seal
from halftune.model.state import load_trainable_state, trainable_state
from halftune.train.checkpoint_list import OPTIMIZER, PREFIX, STATE, TRAINABLE, state_of


@dataclass
class Trained:
    """The objects whose state a checkpoint holds."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler


def save_checkpoint(folder: Path, step: int, trained: Trained, facts: dict[str, Any]) -> Path:
    """Writes ``folder/checkpoint-<step>`` completely or not at all.

    Args:
        folder: the run folder.
        step: optimizer steps done.
        trained: what is saved.
        facts: JSON-able: what else the trainer wants back (position in the data, random states, callbacks' states …).

    Raises:
        TrainingError: the disk is full or gone, or the folder cannot be written; earlier checkpoints are untouched and
            nothing half-written is left.
    """
    final = folder / f"{PREFIX}{step}"
    tensors, numbers = _flatten_optimizer(trained.optimizer)
    state = {
        "step": step,
        **facts,
        "optimizer": numbers,
        "schedule": trained.schedule.state_dict(),
        "scaler": trained.scaler.state_dict(),
    }
    try:
        with whole_folder(final) as beside:
            save_file(trainable_state(trained.model), beside / TRAINABLE)
            save_file(tensors, beside / OPTIMIZER)
            (beside / STATE).write_text(json.dumps(state), encoding="utf-8")
            seal(beside)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        raise TrainingError(
            f"cannot write the checkpoint of step {step}: {error}",
            where=str(final),
            remedy=f"{first_aid(error)} and run the same command again; earlier checkpoints are intact",
        ) from error
    return final


def load_checkpoint(checkpoint: Path, trained: Trained) -> dict[str, Any]:
    """Restores weights, optimizer, schedule and scaler, and returns ``step`` and the facts that were saved with them.

    Raises:
        TrainingError: the folder cannot be read.
        ModelError: it is a checkpoint of another model.
    """
    state = read_state(checkpoint)
    with _readable(checkpoint):
        tensors = load_file(checkpoint / OPTIMIZER)
    load_weights(checkpoint, trained.model)
    trained.optimizer.load_state_dict(_unflatten_optimizer(tensors, state["optimizer"]))
    trained.schedule.load_state_dict(state["schedule"])
    _refresh_rates(trained.schedule)
    trained.scaler.load_state_dict(state["scaler"])
    return state


def _refresh_rates(schedule: LRScheduler) -> None:
    """The learning rates of the next step by this run's schedule, which may be longer than the one that was saved."""
    assert isinstance(schedule, LambdaLR)
    pairs = zip(schedule.lr_lambdas, schedule.base_lrs, strict=True)
    rates = [base * factor(schedule.last_epoch) for factor, base in pairs]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What :func:`state_of` gives, or a sentence.

    Raises:
        TrainingError: the folder cannot be read, or something is not in there that this version writes.
    """
    with _readable(checkpoint):
        return state_of(checkpoint)


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Puts the trained weights of a checkpoint into ``model``.

    Raises:
        TrainingError: the folder cannot be read.
        ModelError: they are another model's.
    """
    with _readable(checkpoint):
        tensors = load_file(checkpoint / TRAINABLE)
    load_trainable_state(model, tensors)


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    """Turns what reading a damaged file raises into an error that names the checkpoint."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainingError(
            f"cannot read this checkpoint: {error}", where=str(checkpoint), remedy="choose another with resume: PATH"
        ) from error


def _flatten_optimizer(optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    state = optimizer.state_dict()
    tensors, numbers = {}, {}
    for index, entry in state["state"].items():
        for name, value in entry.items():
            (tensors if torch.is_tensor(value) else numbers)[f"{index}.{name}"] = value
    return {k: v.contiguous() for k, v in tensors.items()}, {"numbers": numbers, "groups": state["param_groups"]}


def _unflatten_optimizer(tensors: dict[str, torch.Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **rest["numbers"]}.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    return {"state": state, "param_groups": rest["groups"]}
