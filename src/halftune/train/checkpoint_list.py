"""The checkpoints of a run folder: which there are, which are valid, and which may go. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from halftune.core.atomic import remove_folder
from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.core.manifest import MARKER, damage

log = get_logger(__name__)

PREFIX = "checkpoint-"


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def folders(folder: Path) -> list[Path]:
    """Everything in a run folder that is named like a checkpoint, oldest first, valid or not."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted(found, key=step_of)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first; by the sizes of their files, not by checksums."""
    return [path for path in folders(folder) if not damage(path, thorough=False)]


def newest_valid(folder: Path) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; None where there is none at all.

    Folders that are none are ignored, and a warning says why.

    Raises:
        TrainingError: there are checkpoints, and all of them are damaged.
    """
    found = folders(folder)
    sealed = [path for path in found if (path / MARKER).exists()]
    for path in reversed(found):
        if not (wrong := damage(path, thorough=True)):
            return path
        log.warning("%s is no valid checkpoint and is ignored: %s", path, wrong)
    if sealed:
        raise TrainingError(
            f"all checkpoints are damaged, the newest: {damage(sealed[-1], thorough=True)}",
            where=str(folder),
            remedy="put them back from a copy, or delete them to begin anew",
        )
    return None


def rotate(folder: Path, limit: int | None, best_step: int | None) -> None:
    """Removes the oldest complete checkpoints beyond ``limit``; never the newest, never the best.

    Args:
        folder: the run folder, into which a checkpoint has just been written.
        limit: how many to keep; None keeps all.
        best_step: step of the best evaluation.
    """
    if limit is None:
        return
    kept = checkpoints(folder)
    spare = [path for path in kept[:-1] if step_of(path) != best_step]
    for path in spare[: max(0, len(kept) - limit)]:
        try:
            remove_folder(path)
        except OSError as error:
            log.warning("cannot remove %s, which training.save_total_limit spares no place: %s", path, error.strerror)
