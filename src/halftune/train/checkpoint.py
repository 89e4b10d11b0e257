"""Checkpoints to go on from: safetensors and JSON, written beside their final name and renamed when complete."""

from __future__ import annotations

import json
import os
import shutil
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

from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.model.state import load_trainable_state, trainable_state

log = get_logger(__name__)

MARKER = "checkpoint.json"  # written last: a folder without it is no checkpoint
PREFIX = "checkpoint-"
TRAINABLE, OPTIMIZER = "trainable.safetensors", "optimizer.safetensors"


@dataclass
class Trained:
    """The objects whose state a checkpoint holds."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler


def save_checkpoint(
    folder: Path, step: int, trained: Trained, progress: dict[str, Any], randoms: list[dict[str, Any]]
) -> Path:
    """Writes ``folder/checkpoint-<step>`` completely or not at all.

    Args:
        progress: JSON-able facts that the trainer wants back (epoch, best evaluation …).
        randoms: random state of every process, by rank.

    Raises:
        TrainingError: the disk is full or the folder cannot be written; earlier checkpoints are untouched.
    """
    final = folder / f"{PREFIX}{step}"
    beside = folder / f".{PREFIX}{step}.writing"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        tensors, numbers = _flatten_optimizer(trained.optimizer)
        save_file(trainable_state(trained.model), beside / TRAINABLE)
        save_file(tensors, beside / OPTIMIZER)
        state = {
            "step": step,
            "progress": progress,
            "optimizer": numbers,
            "schedule": trained.schedule.state_dict(),
            "scaler": trained.scaler.state_dict(),
            "random": randoms,
        }
        (beside / MARKER).write_text(json.dumps(state), encoding="utf-8")
        for path in beside.iterdir():
            _fsync(path)
        if final.exists():
            shutil.rmtree(final)
        beside.rename(final)
        _fsync(folder)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        shutil.rmtree(beside, ignore_errors=True)
        raise TrainingError(
            f"cannot write the checkpoint of step {step}: {error}",
            where=str(final),
            remedy="free space or choose another training.output_dir; earlier checkpoints are intact",
        ) from error
    return final


def load_checkpoint(checkpoint: Path, trained: Trained) -> dict[str, Any]:
    """Restores weights, optimizer, schedule and scaler, and returns ``step``, ``progress`` and ``random``.

    Raises:
        TrainingError: the folder is no complete checkpoint of this model.
    """
    state = read_state(checkpoint)
    with _complete(checkpoint):
        tensors = load_file(checkpoint / OPTIMIZER)
        load_weights(checkpoint, trained.model)
    trained.optimizer.load_state_dict(_unflatten_optimizer(tensors, state["optimizer"]))
    trained.schedule.load_state_dict(state["schedule"])
    _refresh_rates(trained.schedule)
    trained.scaler.load_state_dict(state["scaler"])
    return {key: state[key] for key in ("step", "progress", "random")}


def _refresh_rates(schedule: LRScheduler) -> None:
    """The learning rates of the next step by this run's schedule, which may be longer than the one that was saved."""
    assert isinstance(schedule, LambdaLR)
    pairs = zip(schedule.lr_lambdas, schedule.base_lrs, strict=True)
    rates = [base * factor(schedule.last_epoch) for factor, base in pairs]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says in JSON: ``step``, ``progress``, ``random`` and the numbers of optimizer and schedule.

    Raises:
        TrainingError: the folder is no complete checkpoint.
    """
    with _complete(checkpoint):
        return json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))


@contextmanager
def _complete(checkpoint: Path) -> Iterator[None]:
    """Turns what reading a damaged file raises into an error that names the checkpoint."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainingError(
            f"not a complete checkpoint: {error}", where=str(checkpoint), remedy="choose another one, or resume: never"
        ) from error


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Puts the trained weights of a checkpoint into ``model``."""
    load_trainable_state(model, load_file(checkpoint / TRAINABLE))


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    for path in found:
        if not (path / MARKER).is_file():
            log.warning("%s is no complete checkpoint and is ignored", path)
    return sorted((p for p in found if (p / MARKER).is_file()), key=lambda path: int(path.name.removeprefix(PREFIX)))


def rotate(folder: Path, limit: int | None, best_step: int | None) -> None:
    """Removes the oldest checkpoints beyond ``limit``; never the newest, never the best."""
    kept = checkpoints(folder)
    if limit is None:
        return
    spare = [path for path in kept[:-1] if path.name != f"{PREFIX}{best_step}"]
    for path in spare[: max(0, len(kept) - limit)]:
        (path / MARKER).unlink()  # first: what is left of a removal that was cut short is no checkpoint
        shutil.rmtree(path)


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


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
