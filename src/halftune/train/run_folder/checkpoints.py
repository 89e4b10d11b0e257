"""The checkpoints of a run folder: which there are, which are valid, and which may go. Needs no torch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from halftune.core.atomic import WRITING, remove_folder
from halftune.core.errors import TrainingError
from halftune.core.files import read_json
from halftune.core.log import get_logger
from halftune.core.manifest import MARKER, damage
from halftune.model.files.target import OPTIMIZER, STATE, TRAINABLE

log = get_logger(__name__)

PREFIX = "checkpoint-"
_NAMED = re.compile(rf"{PREFIX}(0|[1-9][0-9]*)")  # one name for one step
INITIAL = "initial.safetensors"  # the first weights of an adapter that began with a part of the base weights
MOST_STATE = 1 << 30  # bytes of state.json: random states take some 30 kB a process
# Facts that an older version did not write.
YOUNGER: dict[str, Any] = {"made_with": {}, "total_steps": None, "began": None, "made_of": None, "stream": []}


class _Position(BaseModel):
    rows_per_step: PositiveInt
    data: str
    order: str
    steps_in_epoch: PositiveInt


class _Group(BaseModel):
    params: list[int]


class _Optimizer(BaseModel):
    numbers: dict[str, Any]
    groups: list[_Group]


class _State(BaseModel):
    """What is asked of ``state.json`` by name; what callbacks and libraries wrote in there is theirs to read."""

    model_config = ConfigDict(strict=True)

    step: NonNegativeInt
    epoch: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    best: Annotated[tuple[NonNegativeInt, float], Field(strict=False)] | None
    evaluated: int
    position: _Position
    micro_batch: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]
    random: list[dict[str, Any]]
    stream: list[dict[str, Any] | None]
    callbacks: dict[str, dict[str, Any]]
    optimizer: _Optimizer
    schedule: dict[str, Any]
    scaler: dict[str, Any]
    made_with: dict[str, Any]
    total_steps: int | None
    began: str | None


def part_name(name: str, rank: int, processes: int) -> str:
    """The file of one process of several: ``trainable-00001-of-00004.safetensors``."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{rank:05d}-of-{processes:05d}{dot}{suffix}"


def parts(checkpoint: Path, name: str) -> list[str]:
    """The files of a checkpoint that together hold what one process would have written as ``name``."""
    stem, _, suffix = name.rpartition(".")
    first = next(checkpoint.glob(f"{stem}-00000-of-{'[0-9]' * 5}.{suffix}"), None)  # halftune writes five digits
    if first is None:
        return [name]
    processes = int(first.stem.rpartition("-")[2])
    return [part_name(name, rank, processes) for rank in range(processes)]


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def folders(folder: Path) -> list[Path]:
    """Everything in a run folder that is named like a checkpoint, oldest first, valid or not."""
    found = [path for path in folder.glob(f"{PREFIX}*") if _NAMED.fullmatch(path.name)]
    return sorted(found, key=step_of)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first; by the sizes of their files, not by checksums."""
    return [path for path in folders(folder) if not find_damage(path, thorough=False)]


def find_damage(checkpoint: Path, *, thorough: bool, share: tuple[int, int] = (0, 1)) -> str:
    """Return why a folder cannot be resumed from, as a clause; empty for a valid checkpoint of this version.

    Args:
        checkpoint: the folder.
        thorough: compare checksums and look into ``state.json``; else the sizes of the files only.
        share: as :func:`~halftune.core.manifest.damage` has it.
    """
    try:
        files = [*parts(checkpoint, TRAINABLE), *parts(checkpoint, OPTIMIZER), STATE]
        if wrong := damage(checkpoint, thorough=thorough, expected=files, share=share):
            return wrong
        if thorough:
            state_of(checkpoint)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def state_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says in JSON: ``step``, the facts, and the numbers of optimizer, schedule and scaler.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON object, or something that this version writes is missing or of another kind.
    """
    state = read_json(checkpoint / STATE, MOST_STATE)
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} holds no object")
    state = YOUNGER | state
    try:
        _State.model_validate(state)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        what = f"has no {key!r}" if first["type"] == "missing" else f"has a wrong value at {key!r}"
        raise ValueError(f"{STATE} {what}: it was written by another version of halftune, or edited") from None
    if _NAMED.fullmatch(checkpoint.name) and state["step"] != step_of(checkpoint):
        raise ValueError(f"{STATE} is of step {state['step']}")
    return state


def _whole(checkpoint: Path) -> str:
    return find_damage(checkpoint, thorough=True)


def newest_valid(
    folder: Path, found: Sequence[Path] | None = None, wrong_with: Callable[[Path], str] = _whole
) -> Path | None:
    """Return the newest checkpoint with valid checksums; None if the folder holds no checkpoint.

    Invalid checkpoints are skipped with a warning.

    Args:
        folder: the run folder.
        found: checkpoints to choose from, the newest last; by default all in the run folder.
        wrong_with: what is wrong with one, as a clause; by default as :func:`find_damage` says after reading all of it.

    Raises:
        TrainingError: there are checkpoints, and all of them are damaged.
    """
    damaged: list[str] = []  # the newest first
    for path in reversed(folders(folder) if found is None else found):
        if not (wrong := wrong_with(path)):
            return path
        log.warning("ignoring invalid checkpoint %s: %s", path, wrong)
        damaged += [wrong] if (path / MARKER).exists() else []
    if damaged:
        raise TrainingError(
            f"all checkpoints are damaged, the newest: {damaged[0]}",
            where=str(folder),
            remedy="restore them from a copy, or delete them to start again",
            code="train.checkpoint_damaged",
        )
    return None


def intact(folder: Path) -> str:
    """Which checkpoint of a run folder can be relied on, as a clause."""
    done = checkpoints(folder)
    return f"{done[-1]} is intact" if done else "there is no checkpoint yet"


def rotate(folder: Path, limit: int | None, needed: Collection[Path]) -> None:
    """Removes the oldest complete checkpoints beyond ``limit``; never the newest, never one that is needed.

    Args:
        folder: the run folder.
        limit: how many to keep; None keeps all.
        needed: checkpoints that stay, such as that of the best evaluation.
    """
    for left in folder.glob(f".{PREFIX}*{WRITING}"):  # a removal that could not be finished
        shutil.rmtree(left, ignore_errors=True)
    if limit is None:
        return
    kept = checkpoints(folder)
    stay = {path.resolve() for path in needed}
    spare = [path for path in kept[:-1] if path.resolve() not in stay]
    for path in spare[: max(0, len(kept) - limit)]:
        try:
            remove_folder(path)
        except OSError as error:
            log.warning("cannot remove %s (training.save_total_limit): %s", path, error.strerror)
