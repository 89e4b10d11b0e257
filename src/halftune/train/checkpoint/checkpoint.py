"""Save and load checkpoints: safetensors and JSON. The manifest ``checkpoint.json``, written last, marks them complete.

A checkpoint is written as ``.NAME.writing`` beside its place, and renamed (``core.atomic``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from halftune.config.sections.model import AdapterSection, LoraAdapter
from halftune.core.atomic import whole_folder, write_error_remedy
from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.core.manifest import seal
from halftune.core.processes import heartbeat
from halftune.model.files.target import OPTIMIZER, STATE, TRAINABLE
from halftune.model.result.save import load_trainable_state, trainable_state
from halftune.train.numeric_environment import numeric_environment
from halftune.train.run_folder.checkpoints import INITIAL, PREFIX, state_of
from halftune.train.run_folder.start_or_resume import check_exists
from halftune.train.state import TrainState

if TYPE_CHECKING:
    from halftune.train.parallel.shards import Stored

log = get_logger(__name__)

Files = Mapping[str, Mapping[str, torch.Tensor]]


def save_checkpoint(
    run: TrainState,
    randoms: list[dict[str, Any]],
    callbacks: dict[str, Any],
    places: Sequence[dict[str, Any] | None] = (),
) -> Path | None:
    """Writes ``checkpoint-<step>`` of a run completely or not at all; called by all processes where they share weights.

    Args:
        run: its state is saved.
        randoms: random states of all processes, by rank.
        callbacks: states of the callbacks.
        places: where the streamed data of each process is, by rank.

    Returns:
        the checkpoint; None on other processes than the main one.

    Raises:
        TrainingError: the disk is full or gone, or the folder cannot be written; earlier checkpoints are untouched and
            nothing half-written is left; or the optimizer's state cannot be saved.
    """
    files, numbers = tensors_of(run)
    if not run.is_main:
        if run.sharded:
            _write_shared(run, None, files)
        return None
    check_exists(run.folder)
    final = run.folder / f"{PREFIX}{run.step}"
    state = {
        "step": run.step,
        "epoch": run.epoch,
        "best": run.best,
        "evaluated": run.evaluated,
        "position": run.position,
        "micro_batch": [run.micro_batch, run.feed.batch.micro_batch],
        "random": randoms,
        "stream": list(places),
        "callbacks": callbacks,
        "made_with": numeric_environment(run),
        "made_of": run.inputs,
        "total_steps": run.total_steps,
        "began": run.began,
        "optimizer": {"name": run.config.training.optim, **numbers},
        "schedule": run.schedule.state_dict(),
        "scaler": run.scaler.state_dict(),
    }
    try:
        with whole_folder(final) as beside:
            known = _write_shared(run, beside, files) if run.sharded else write_plain(beside, files)
            (beside / STATE).write_text(json.dumps(state), encoding="utf-8")
            seal(beside, known=known)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        raise TrainingError(
            f"cannot write the checkpoint of step {run.step}: {error}",
            where=str(final),
            remedy=f"{write_error_remedy(error)} and run the same command again; earlier checkpoints are intact",
            code="core.cannot_write",
        ) from error
    return final


def tensors_of(run: TrainState) -> tuple[Files, dict[str, Any]]:
    """A checkpoint's files of tensors, not copied, and the numbers beside them that the optimizer has.

    Raises:
        TrainingError: the optimizer keeps state that a checkpoint would not hold.
    """
    _check_saveable(run.optimizer)
    tensors, numbers = _flatten_optimizer(run.optimizer)
    files = {TRAINABLE: trainable_state(run.model), OPTIMIZER: tensors}
    if first := vars(run.model).get("initial_adapter"):
        files[INITIAL] = first
    return files, numbers


def _write_shared(run: TrainState, folder: Path | None, files: Files) -> dict[str, dict[str, Any]]:
    from halftune.train.parallel.saving import write_together

    return write_together(run.strategy, folder, files, plain=isinstance(run.model, PeftModel))


def write_plain(folder: Path, files: Files) -> dict[str, dict[str, Any]]:
    """Writes each file by this process alone.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    for name, tensors in files.items():
        heartbeat.beat(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(dict(tensors), folder / name)
    return {}


def load_checkpoint(checkpoint: Path, run: TrainState) -> dict[str, Any]:
    """Restores weights, optimizer, schedule, scaler and counters; returns everything that the checkpoint says.

    Each process reads only its own shards of weights and moments. The best evaluation is restored if base model and
    data are unchanged; with ``load_best``, its checkpoint must exist as well.

    Raises:
        TrainingError: the folder cannot be read, or it holds the state of another optimizer.
        ModelError: it is a checkpoint of another model.
    """
    state, training = read_state(checkpoint), run.config.training
    if (saved_name := state["optimizer"].get("name", training.optim)) != training.optim:
        raise TrainingError(
            f"the checkpoint holds the state of {saved_name}, and training.optim is {training.optim}",
            where=str(checkpoint),
            remedy=f"training.optim: {saved_name}, or training.resume: never with another output_dir",
            code="train.checkpoint_mismatch",
        )
    load_weights(checkpoint, run.model)
    with checkpoint_errors(checkpoint):
        _load_optimizer(checkpoint, run.optimizer, state["optimizer"])
        _restore_schedule(run.schedule, state["schedule"], state["step"])
        scaling = {name: state["scaler"].get(name, value) for name, value in run.scaler.state_dict().items()}
        run.scaler.load_state_dict(scaling)
    run.step, run.epoch, run.saved = state["step"], state["epoch"], state["step"]
    run.began = state["began"] if training.resume in ("auto", "never") else str(Path(training.resume).resolve())
    if run.changes.parts:
        return state
    run.evaluated, best = state["evaluated"], state["best"]
    if best is not None and training.load_best and not (run.folder / f"{PREFIX}{best[0]}").is_dir():
        log.warning("the best evaluation so far (step %d) was not saved: it does not count for load_best", best[0])
    elif best is not None:
        run.best = best[0], best[1]
    return state


def _load_optimizer(checkpoint: Path, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    indices = [index for group in saved["groups"] for index in group["params"]]
    owners = dict(zip(map(str, indices), weights, strict=False))
    with _stored(checkpoint, OPTIMIZER) as file:
        tensors = {key: file.share(key, owners.get(key.partition(".")[0])) for key in file.shapes}
        _check_shapes(tensors, owners, optimizer)
    _keep_options(saved["groups"], optimizer)
    optimizer.load_state_dict(_unflatten_optimizer(tensors, saved))


def _restore_schedule(schedule: LRScheduler, saved: dict[str, Any], step: int) -> None:
    """Where the schedule was, and the learning rates of the next step by this run's own, which may be longer.

    Raises:
        LookupError, ValueError: the saved one was never there; steps that are left out do not count.
    """
    assert isinstance(schedule, LambdaLR)
    reached, count = saved["last_epoch"], saved["_step_count"]
    if type(reached) is not int or not 0 <= reached <= step or count != reached + 1:
        raise ValueError(f"the schedule is at {str(reached)[:20]} of {step} steps")
    schedule.last_epoch, schedule._step_count = reached, count
    pairs = zip(schedule.lr_lambdas, schedule.base_lrs, strict=True)
    rates = [base * factor(schedule.last_epoch) for factor, base in pairs]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read ``state.json`` as :func:`state_of`, with user-facing errors.

    Raises:
        TrainingError: the folder cannot be read, or something is not in there that this version writes.
    """
    with checkpoint_errors(checkpoint):
        return state_of(checkpoint)


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Puts the trained weights of a checkpoint into ``model``.

    Raises:
        TrainingError: the folder cannot be read.
        ModelError: they are another model's.
    """
    own = trainable_state(model)
    with checkpoint_errors(checkpoint), _stored(checkpoint, TRAINABLE) as saved:
        tensors = {name: saved.share(name, own.get(name)) for name in saved.shapes}
    load_trainable_state(model, tensors)


def first_weights(checkpoint: Path | None, adapter: AdapterSection) -> dict[str, torch.Tensor] | None:
    """The first A and B of an adapter that began with a part of the base weights; None for others.

    Raises:
        TrainingError: the checkpoint has none, or cannot be read.
    """
    if checkpoint is None or not isinstance(adapter, LoraAdapter) or not adapter.reduces_base:
        return None
    with checkpoint_errors(checkpoint):
        return load_file(checkpoint / INITIAL)


def _stored(checkpoint: Path, name: str) -> AbstractContextManager[Stored]:
    from halftune.train.parallel.shards import stored  # a new run reads none

    return stored(checkpoint, name)


@contextmanager
def open_weights(checkpoint: Path) -> Iterator[Stored]:
    """Open the trained weights of a checkpoint; tensors are read on request.

    Raises:
        TrainingError: the folder cannot be read.
    """
    with ExitStack() as stack:
        with checkpoint_errors(checkpoint):  # not around what is done with it
            saved = stack.enter_context(_stored(checkpoint, TRAINABLE))
        yield saved


_BLOCK = 256  # elements of an 8-bit state of bitsandbytes that share a scale
_UNREADABLE = (OSError, SafetensorError, RuntimeError)
_UNREADABLE += (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)  # values that cannot be


@contextmanager
def checkpoint_errors(checkpoint: Path) -> Iterator[None]:
    """Convert errors of reading and restoring a checkpoint to :class:`TrainingError`.

    Raises:
        TrainingError: names the checkpoint.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _UNREADABLE as error:
        raise TrainingError(
            f"cannot read this checkpoint: {error or type(error).__name__}",
            where=str(checkpoint),
            remedy="choose another with resume: PATH",
            code="train.checkpoint_damaged",
        ) from error


def _check_saveable(optimizer: Optimizer) -> None:
    """Makes sure that ``state_dict`` holds all state, as tensors and plain numbers: what it lacks is lost on resume.

    Raises:
        TrainingError: names what a checkpoint would not hold.
    """
    lost = [
        f"{name} of parameter {index} ({type(value).__name__})"
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if not isinstance(value, torch.Tensor | bool | int | float | str | None)
    ]
    for name, value in vars(optimizer).items():
        for one in value if isinstance(value, list | tuple) else (value,):
            hidden = isinstance(one, Optimizer) and one.state is not optimizer.state
            if hidden or torch.is_tensor(one):
                lost.append(f"attribute {name} ({type(one).__name__})")
    if lost:
        raise TrainingError(
            f"a checkpoint cannot hold the state of {type(optimizer).__name__}: {lost[0]} is not in its state_dict()",
            remedy="choose another training.optim",
            code="train.optimizer_not_saved",
        )


def _flatten_optimizer(optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    state = optimizer.state_dict()
    tensors, numbers = {}, {}
    for index, entry in state["state"].items():
        for name, value in entry.items():
            (tensors if torch.is_tensor(value) else numbers)[f"{index}.{name}"] = value
    return {k: v.contiguous() for k, v in tensors.items()}, {"numbers": numbers, "groups": state["param_groups"]}


def _keep_options(groups: list[dict[str, Any]], optimizer: Optimizer) -> None:
    """Replace the options of the saved groups by those of this run's recipe and device."""
    for saved, own in zip(groups, optimizer.param_groups, strict=False):  # torch refuses another number of groups
        kept = {**own, "params": saved["params"]}
        saved.clear()
        saved.update(kept)


def _check_shapes(tensors: dict[str, torch.Tensor], owners: dict[str, Any], optimizer: Optimizer) -> None:
    own = getattr(optimizer, "state_shape", None)  # of an optimizer whose state has other shapes than the weights
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        weight = owners.get(index)
        wanted = None if weight is None else own(weight, name) if own else _shape_of(name, weight.shape)
        if wanted is not None and tensor.shape != wanted:
            raise ValueError(f"{OPTIMIZER}: {key} is {tuple(tensor.shape)}, expected {tuple(wanted)}")


def _shape_of(name: str, weight: torch.Size) -> torch.Size | None:
    """Shape of a part of an optimizer's state; None for quantised ones, which are copied into new ones.

    torch and bitsandbytes do not compare: their kernels would read beyond a shorter tensor.
    """
    if name == "step":
        return torch.Size()
    if name.endswith(("_codes", "_scale")):
        return None
    if name.startswith("absmax"):
        return torch.Size([-(-weight.numel() // _BLOCK)])
    factored = {"row_var": (*weight[:-1], 1), "col_var": (*weight[:-2], 1, *weight[-1:])}
    return torch.Size(factored.get(name, weight))


def _unflatten_optimizer(tensors: dict[str, torch.Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **rest["numbers"]}.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    return {"state": state, "param_groups": rest["groups"]}
