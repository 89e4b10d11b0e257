"""Whether a run starts in its folder, resumes there or is finished; and what a run is, written down."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halftune.config.load import LoadedConfig
from halftune.config.render import resolved_yaml
from halftune.core.atomic import clear_leftovers, write_error_remedy, write_text
from halftune.core.errors import ConfigError, TrainingError
from halftune.core.log import get_logger
from halftune.core.status import NAME as STATUS
from halftune.core.status import STARTED
from halftune.model.files.result import FINAL, FINISHED, damage_of_result, finished_at
from halftune.model.files.target import RESOLVED
from halftune.plan import Plan, to_dict
from halftune.train.run_folder.checkpoints import find_damage, folders, newest_valid, state_of
from halftune.train.run_folder.lock import LOCK
from halftune.train.run_folder.same_run import REOPENING, differences, flat, recorded, refuse_differences

if TYPE_CHECKING:
    from halftune.data.report import DataReport

log = get_logger(__name__)

ASIDE = "set-aside"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: ``training.output_dir``.
        resume_from: the checkpoint to go on from, or None.
        finished: the run is there already, complete.
        damaged: it was finished, and its result is not what was written.
        unverified: of several processes, checkpoints to choose from, the first choice last: they read them together.
    """

    path: Path
    resume_from: Path | None
    finished: bool
    damaged: bool = False
    unverified: tuple[Path, ...] = ()

    @property
    def final(self) -> Path:
        """The adapter or model that training leaves."""
        return self.path / FINAL


def open_folder(loaded: LoadedConfig, *, main: bool = True, several: bool = False) -> RunFolder:
    """Decide whether a run starts, resumes or is already complete.

    Args:
        loaded: the configuration.
        main: tidy up after a process that was killed, and read checksums; not on several processes at once.
        several: leave the choice of a checkpoint to all processes together, once they can talk.

    Raises:
        ConfigError: the folder holds another run (says what differs), or ``resume: never`` meets a used folder.
        TrainingError: the checkpoint named by ``resume``, or all there are, are damaged.
    """
    path, resume = Path(loaded.run.training.output_dir), loaded.run.training.resume
    before, now = check_free(loaded), flat(loaded.run.model_dump(mode="json"))
    if main:
        clear_leftovers(path)
    if before is None:
        return _new_folder(path, _named(resume, loaded, thorough=not several), several=several)
    if not (why := _left_to_do(path, before, now)):
        return RunFolder(path, None, finished=True)
    log.info("resuming: %s", why)
    if changed := differences(before, now, harmless=True):
        log.info("changed since the run began, which is allowed: %s", "; ".join(changed))
    damaged = main and bool(damage_of_result(path))
    if several:
        return RunFolder(path, None, finished=False, damaged=damaged, unverified=_candidates(path, resume))
    if not main:
        return RunFolder(path, None if resume == "auto" else _named(resume, loaded), finished=False, damaged=damaged)
    if resume == "auto":
        newest = newest_valid(path)
    else:
        named = _named(resume, loaded)
        newest = None if named is None else _newest_begun_from(path, named)
    if newest is None:
        log.info("%s has no checkpoint: training starts at step 0", path)
    return RunFolder(path, newest, finished=False, damaged=damaged)


def _new_folder(path: Path, named: Path | None, *, several: bool) -> RunFolder:
    """The folder of a run that begins, from a checkpoint of another one if one is named."""
    if several:
        return RunFolder(path, None, finished=False, unverified=() if named is None else (named,))
    return RunFolder(path, named, finished=False)


def check_free(loaded: LoadedConfig) -> dict[str, object] | None:
    """Makes sure that this run may use its folder; changes nothing and needs no torch.

    Returns:
        the configuration of the run that is in there and may go on; None where the folder is new, or the run in there
        ended before its first step (out of memory …) and left nothing that another one could write over.

    Raises:
        ConfigError: the folder holds another run (says what differs) or other things, or ``resume: never`` meets a run.
        TrainingError: ``resume`` names what is no checkpoint.
    """
    path = Path(loaded.run.training.output_dir)
    _named(loaded.run.training.resume, loaded, thorough=False)
    if not (path / RESOLVED).exists():
        _check_empty(path)
        return None
    if not holds_results(path):
        return None
    if loaded.run.training.resume == "never":
        raise ConfigError(
            "the folder already contains a run, and training.resume is 'never'",
            where=str(path),
            remedy="choose another training.output_dir, or delete that folder",
            code="train.output_dir_taken",
        )
    before = recorded(path / RESOLVED)
    refuse_differences(before, flat(loaded.run.model_dump(mode="json")), path)
    return before


def holds_results(path: Path) -> bool:
    """Whether a run has left anything but its intent."""
    metrics = path / METRICS
    written = metrics.exists() and metrics.stat().st_size > 0
    kept = any((path / name).exists() for name in (FINAL, f".{FINAL}.old", FINISHED, ASIDE))
    return written or kept or bool(folders(path))


def already_finished(loaded: LoadedConfig) -> str:
    """Return the message for a completed run; empty if there is work to do. Imports no torch.

    Raises:
        as :func:`check_free`.
    """
    path, before = Path(loaded.run.training.output_dir), check_free(loaded)
    if before is None or _left_to_do(path, before, flat(loaded.run.model_dump(mode="json"))):
        return ""
    return completed_message(path)


def completed_message(path: Path) -> str:
    """What is said where a finished run is started again."""
    lost = "" if (path / METRICS).is_file() else f"; {METRICS} is missing: its metrics are lost"
    return f"{path} is already complete ({finished_at(path)} steps){lost}"


def _left_to_do(path: Path, before: dict[str, object], now: dict[str, object]) -> str:
    """Why a run is not finished, or not any more, as a clause; empty where it is.

    Raises:
        ConfigError: it was finished and something is left, but there is no checkpoint to go on from; or nothing is left
            and ``resume`` names a checkpoint that it was not begun from.
    """
    if finished_at(path) is None:
        return "it is not finished"
    why = ""
    if any(before.get(key) != now[key] for key in REOPENING):
        changed = "; ".join(differences(before, now, harmless=True))
        why = f"it was finished, and its configuration changed ({changed})"
    elif wrong := damage_of_result(path):
        why = f"it was finished and its result is damaged ({wrong})"
    elif now["training.resume"] not in ("auto", "never", before.get("training.resume")):
        raise ConfigError(
            f"the run is finished, and resume names {now['training.resume']}: its result would be overwritten",
            where=str(path),
            remedy="choose another training.output_dir, or resume: auto",
            code="train.run_finished",
        )
    if why and not folders(path):
        raise ConfigError(
            f"cannot resume: {why}, and the folder has no checkpoint (training.save_steps: end)",
            where=str(path),
            remedy="choose another training.output_dir",
            code="train.nothing_to_resume",
        )
    return why


def check_exists(path: Path) -> None:
    """Makes sure that a run's folder is still there before something is saved: under an unmounted disk is another one.

    Raises:
        TrainingError: it has vanished.
    """
    if not (path / RESOLVED).exists():
        raise TrainingError(
            "the run folder has vanished: its disk was unmounted, or the folder was moved or deleted",
            where=str(path),
            remedy="put it back and run the same command again: it resumes from the newest checkpoint in there",
            code="train.folder_vanished",
        )


def _check_empty(path: Path) -> None:
    # what a run that was killed at its very start leaves, and what the web UI notes of one that it starts
    own = {LOCK, f".{RESOLVED}.writing", STATUS, f".{STATUS}.writing", STARTED}
    unrelated = sorted(entry.name for entry in path.iterdir() if entry.name not in own) if path.is_dir() else []
    if unrelated:
        raise ConfigError(
            f"output_dir contains unrelated files: {', '.join(unrelated[:3])}",
            where=str(path),
            remedy="choose another training.output_dir",
            code="train.output_dir_taken",
        )


def _named(resume: str, loaded: LoadedConfig, *, thorough: bool = True) -> Path | None:
    """The checkpoint that ``resume`` names, of a run of the same configuration."""
    if resume in ("auto", "never"):
        return None
    path = Path(resume)
    if wrong := find_damage(path, thorough=thorough):
        what = f"training.resume: {resume} is not a valid checkpoint: {wrong}"
        raise TrainingError(what, remedy="set training.resume: auto", code="train.checkpoint_damaged")
    if (path.parent / RESOLVED).is_file():
        now = flat(loaded.run.model_dump(mode="json"))
        refuse_differences(recorded(path.parent / RESOLVED), now, path.parent)
    return path


def _newest_begun_from(path: Path, named: Path) -> Path:
    """The newest checkpoint of a run that was begun from ``named`` before; ``named`` where there is none."""
    for checkpoint in reversed(folders(path)):
        if find_damage(checkpoint, thorough=True) or state_of(checkpoint)["began"] != str(named.resolve()):
            continue
        log.info("%s was started from %s; resuming from its %s", path, named, checkpoint.name)
        return checkpoint
    return named


def _candidates(path: Path, resume: str) -> tuple[Path, ...]:
    """Checkpoints to go on from, the first choice last: all, or the one named and those of the run begun from it."""
    if resume == "auto":
        return tuple(folders(path))
    named = Path(resume)
    return (named, *(one for one in folders(path) if _began(one) == str(named.resolve())))


def _began(checkpoint: Path) -> Any:
    """Which checkpoint the run of another one was begun from; None where it cannot be read."""
    try:
        return state_of(checkpoint)["began"]
    except (OSError, ValueError):
        return None


def move_aside(path: Path, why: str) -> None:
    """Move a file of a run folder to ``set-aside`` without overwriting; log the reason."""
    if not path.exists():
        return
    place = path.parent / ASIDE / path.name
    if place.parent.is_symlink():
        remedy = "remove the link, or choose another training.output_dir"
        what = "is a symbolic link: nothing is moved through it"
        raise TrainingError(what, where=str(place.parent), remedy=remedy, code="train.output_dir_is_link")
    place.parent.mkdir(exist_ok=True)
    number = 1
    while place.exists():
        number += 1
        place = path.parent / ASIDE / f"{path.name}.{number}"
    path.rename(place)
    log.warning("%s moved to %s: %s", path, place, why)


def write_intent(folder: RunFolder, loaded: LoadedConfig, plan: Plan, data: DataReport) -> None:
    """Write the user's YAML, the resolved YAML, the plan and the data report.

    Raises:
        TrainingError: the folder cannot be written.
    """
    try:
        if folder.damaged:
            move_aside(folder.path / FINAL, "it is damaged and will be written again")
        (folder.path / FINISHED).unlink(missing_ok=True)  # first: a run that was made longer is not finished any more
        write_text(folder.path / RESOLVED, resolved_yaml(loaded))  # makes it a run folder
        write_text(folder.path / "config.yaml", loaded.text)
        write_text(folder.path / "plan.json", json.dumps(to_dict(plan), indent=1))
        write_text(folder.path / "data_report.json", json.dumps(data.to_dict(), indent=1))
    except OSError as error:
        raise TrainingError(
            f"cannot write the run folder: {error.strerror}",
            where=str(folder.path),
            remedy=f"{write_error_remedy(error)}, or choose another training.output_dir",
            code="core.cannot_write",
        ) from error
