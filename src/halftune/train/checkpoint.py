"""Checkpoints to go on from: safetensors and JSON, valid only under the manifest that is written last."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from halftune.core import alive
from halftune.core.atomic import first_aid, whole_folder
from halftune.core.errors import TrainingError
from halftune.core.manifest import seal
from halftune.model.state import load_trainable_state, trainable_state
from halftune.train.checkpoint_list import OPTIMIZER, PREFIX, STATE, TRAINABLE, state_of
from halftune.train.parallel.shards import Stored, stored


@dataclass
class Trained:
    """The objects whose state a checkpoint holds."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler


Files = Mapping[str, Mapping[str, torch.Tensor]]
Writer = Callable[[Path, Files], dict[str, dict[str, Any]]]
"""Puts files of tensors into a folder and returns what the manifest is to say of those that need not be read again."""


def save_checkpoint(
    folder: Path, step: int, trained: Trained, facts: dict[str, Any], write: Writer | None = None
) -> Path:
    """Writes ``folder/checkpoint-<step>`` completely or not at all; on the main process.

    Args:
        folder: the run folder.
        step: optimizer steps done.
        trained: what is saved.
        facts: JSON-able: what else the trainer wants back (position in the data, random states, callbacks' states …).
        write: how tensors are written, where processes hold shares of them.

    Raises:
        TrainingError: the disk is full or gone, or the folder cannot be written; earlier checkpoints are untouched and
            nothing half-written is left.
    """
    final = folder / f"{PREFIX}{step}"
    files, numbers = tensors_of(trained)
    state = {
        "step": step,
        **facts,
        "optimizer": numbers,
        "schedule": trained.schedule.state_dict(),
        "scaler": trained.scaler.state_dict(),
    }
    try:
        with whole_folder(final) as beside:
            known = (write or write_plain)(beside, files)
            (beside / STATE).write_text(json.dumps(state), encoding="utf-8")
            seal(beside, known=known)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        raise TrainingError(
            f"cannot write the checkpoint of step {step}: {error}",
            where=str(final),
            remedy=f"{first_aid(error)} and run the same command again; earlier checkpoints are intact",
        ) from error
    return final


def tensors_of(trained: Trained) -> tuple[Files, dict[str, Any]]:
    """A checkpoint's files of tensors, not copied, and the numbers beside them that the optimizer has."""
    tensors, numbers = _flatten_optimizer(trained.optimizer)
    return {TRAINABLE: trainable_state(trained.model), OPTIMIZER: tensors}, numbers


def write_plain(folder: Path, files: Files) -> dict[str, dict[str, Any]]:
    """Writes each file by this process alone.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    for name, tensors in files.items():
        alive.sign(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(dict(tensors), folder / name)
    return {}


def load_checkpoint(checkpoint: Path, trained: Trained) -> dict[str, Any]:
    """Restores weights, optimizer, schedule and scaler; returns ``step`` and the facts that were saved with them.

    A process reads its own share of weights and moments only, whoever wrote them.

    Raises:
        TrainingError: the folder cannot be read.
        ModelError: it is a checkpoint of another model.
    """
    state = read_state(checkpoint)
    load_weights(checkpoint, trained.model)
    weights = [weight for group in trained.optimizer.param_groups for weight in group["params"]]
    indices = [index for group in state["optimizer"]["groups"] for index in group["params"]]
    owners = dict(zip(map(str, indices), weights, strict=False))
    with _readable(checkpoint), stored(checkpoint, OPTIMIZER) as saved:
        tensors = {key: saved.share(key, owners.get(key.partition(".")[0])) for key in saved.shapes}
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
    own = trainable_state(model)
    with _readable(checkpoint), stored(checkpoint, TRAINABLE) as saved:
        tensors = {name: saved.share(name, own.get(name)) for name in saved.shapes}
    load_trainable_state(model, tensors)


@contextmanager
def opened(checkpoint: Path) -> Iterator[Stored]:
    """The trained weights of a checkpoint, of which nothing is read before it is asked for.

    Raises:
        TrainingError: the folder cannot be read.
    """
    with _readable(checkpoint), stored(checkpoint, TRAINABLE) as saved:
        yield saved


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
