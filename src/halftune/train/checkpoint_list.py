"""The checkpoints of a run folder: which there are, which are valid, and which may go. Needs no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from halftune.core.atomic import WRITING, remove_folder
from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.core.manifest import MARKER, damage

log = get_logger(__name__)

PREFIX = "checkpoint-"
TRAINABLE, OPTIMIZER, STATE = "trainable.safetensors", "optimizer.safetensors", "state.json"
# What the trainer saves beside weights and optimizer, and asks for when it goes on.
FACTS = ("epoch", "best", "evaluated", "position", "micro_batch", "random", "callbacks")
EXPECTED = ("step", "optimizer", "schedule", "scaler", *FACTS)
# Facts that an older version did not write.
YOUNGER: dict[str, Any] = {"made_with": {}, "total_steps": None, "began": None, "made_of": None}


def part_name(name: str, rank: int, processes: int) -> str:
    """The file of one process of several: ``trainable-00001-of-00004.safetensors``."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{rank:05d}-of-{processes:05d}{dot}{suffix}"


def parts(checkpoint: Path, name: str) -> list[str]:
    """The files of a checkpoint that together hold what one process would have written as ``name``."""
    stem, _, suffix = name.rpartition(".")
    first = next(checkpoint.glob(f"{stem}-00000-of-{'[0-9]' * 5}.{suffix}"), None)  # a longer number is no file of ours
    if first is None:
        return [name]
    processes = int(first.stem.rpartition("-")[2])
    return [part_name(name, rank, processes) for rank in range(processes)]


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def folders(folder: Path) -> list[Path]:
    """Everything in a run folder that is named like a checkpoint, oldest first, valid or not."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted(found, key=step_of)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first; by the sizes of their files, not by checksums."""
    return [path for path in folders(folder) if not flaw(path, thorough=False)]


def flaw(checkpoint: Path, *, thorough: bool, share: tuple[int, int] = (0, 1)) -> str:
    """Why nobody can go on from a folder, as a clause; empty where it is a checkpoint of this version, undamaged.

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
        ValueError: it is no JSON object, or something is not in there that this version writes.
    """
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} holds no object")
    if missing := [name for name in EXPECTED if name not in state]:
        raise ValueError(f"{STATE} has no {missing[0]!r}: another version of halftune wrote it, or a hand")
    return YOUNGER | state


def newest_valid(folder: Path) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; None where there is none at all.

    Folders that are none are ignored, and a warning says why.

    Raises:
        TrainingError: there are checkpoints, and all of them are damaged.
    """
    found = folders(folder)
    sealed = [path for path in found if (path / MARKER).exists()]
    for path in reversed(found):
        if not (wrong := flaw(path, thorough=True)):
            return path
        log.warning("%s is no valid checkpoint and is ignored: %s", path, wrong)
    if sealed:
        raise TrainingError(
            f"all checkpoints are damaged, the newest: {flaw(sealed[-1], thorough=True)}",
            where=str(folder),
            remedy="put them back from a copy, or delete them to begin anew",
        )
    return None


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
            log.warning("cannot remove %s, which training.save_total_limit spares no place: %s", path, error.strerror)
