"""The run folder: what a run is, written down, and whether a new one may go there."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halftune.config.load import LoadedConfig
from halftune.config.render.text import resolved_yaml
from halftune.core.atomic import clear_leftovers, first_aid, write_text
from halftune.core.errors import ConfigError, TrainingError
from halftune.core.files import read_text
from halftune.core.log import get_logger
from halftune.core.manifest import MANIFEST, damage, entry
from halftune.core.status import NAME as STATUS
from halftune.core.status import STARTED
from halftune.plan import Plan, to_dict
from halftune.train.checkpoint_list import flaw, folders, newest_valid, state_of
from halftune.train.lock import LOCK
from halftune.train.same_run import REOPENING, differences, flat, recorded, refuse_differences

if TYPE_CHECKING:
    from halftune.data.report import DataReport

log = get_logger(__name__)

FINAL, FINISHED, ASIDE = "final", "finished.json", "set-aside"
RESOLVED = "resolved.yaml"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: ``training.output_dir``.
        resume_from: the checkpoint to go on from, or None.
        finished: the run is there already, complete.
        damaged: it was finished, and its result is not what was written.
    """

    path: Path
    resume_from: Path | None
    finished: bool
    damaged: bool = False

    @property
    def final(self) -> Path:
        """The adapter or model that training leaves."""
        return self.path / FINAL


def open_folder(loaded: LoadedConfig, *, main: bool = True) -> RunFolder:
    """Decides whether a run starts anew, goes on or is there already.

    Args:
        loaded: the configuration.
        main: tidy up after a process that was killed, and read checksums; not on several processes at once.

    Raises:
        ConfigError: the folder holds another run (says what differs), or ``resume: never`` meets a used folder.
        TrainingError: the checkpoint named by ``resume``, or all there are, are damaged.
    """
    path, resume = Path(loaded.run.training.output_dir), loaded.run.training.resume
    before, now = check_free(loaded), flat(loaded.run.model_dump(mode="json"))
    if main:
        clear_leftovers(path)
    if before is None:
        return RunFolder(path, _named(resume, loaded), finished=False)
    if not (why := _left_to_do(path, before, now)):
        return RunFolder(path, None, finished=True)
    log.info("the run goes on: %s", why)
    if changed := differences(before, now, harmless=True):
        log.info("changed since the run began, which is allowed: %s", "; ".join(changed))
    newest = newest_valid(path) if main and resume == "auto" else None
    if resume != "auto":
        named = _named(resume, loaded)
        newest = _gone_on_from(path, named) if main and named is not None else named
    if newest is None and main:
        log.info("%s has no checkpoint yet: the run begins anew", path)
    return RunFolder(path, newest, finished=False, damaged=main and bool(_damage_of_result(path)))


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
            "the folder holds a run already and resume is 'never'",
            where=str(path),
            remedy="choose another training.output_dir, or delete that folder",
        )
    before = recorded(path / RESOLVED)
    refuse_differences(before, flat(loaded.run.model_dump(mode="json")), path)
    return before


def holds_results(path: Path) -> bool:
    """Whether a run has left anything but its intent."""
    metrics = path / "metrics.jsonl"
    written = metrics.exists() and metrics.stat().st_size > 0
    kept = any((path / name).exists() for name in (FINAL, f".{FINAL}.old", FINISHED, ASIDE))
    return written or kept or bool(folders(path))


def already_finished(loaded: LoadedConfig) -> str:
    """Says that a run is there already, complete; empty where there is something to do. Needs no torch.

    Raises:
        as :func:`check_free`.
    """
    path, before = Path(loaded.run.training.output_dir), check_free(loaded)
    if before is None or _left_to_do(path, before, flat(loaded.run.model_dump(mode="json"))):
        return ""
    return nothing_to_do(path)


def nothing_to_do(path: Path) -> str:
    """What is said where a finished run is started again."""
    return f"{path} is finished already ({finished_at(path)} steps): nothing to do"


def _left_to_do(path: Path, before: dict[str, object], now: dict[str, object]) -> str:
    """Why a run is not finished, or not any more, as a clause; empty where it is.

    Raises:
        ConfigError: it was finished and something is left, but there is no checkpoint to go on from; or nothing is left
            and ``resume`` names a checkpoint that it was not begun from.
    """
    if finished_at(path) is None:
        return "it has not come to its end"
    why = ""
    if any(before.get(key) != now[key] for key in REOPENING):
        changed = "; ".join(differences(before, now, harmless=True))
        why = f"it was finished and is asked for something else now ({changed})"
    elif wrong := _damage_of_result(path):
        why = f"it was finished and its result is damaged ({wrong})"
    elif now["training.resume"] not in ("auto", "never", before.get("training.resume")):
        raise ConfigError(
            f"the run is finished, and resume names {now['training.resume']}: its result would be written over",
            where=str(path),
            remedy="choose another training.output_dir to go on from there, or resume: auto",
        )
    if why and not folders(path):
        raise ConfigError(
            f"the run cannot go on: {why}, and left no checkpoint to go on from (training.save_steps: end)",
            where=str(path),
            remedy="choose another training.output_dir",
        )
    return why


def finished_at(path: Path) -> int | None:
    """The last step of a finished run in this folder; None where there is none."""
    found = _finished(path)
    return None if found is None else found[0]


def write_finished(path: Path, step: int) -> None:
    """Writes down that a run is finished, and which result it has.

    Raises:
        OSError: it cannot be written.
    """
    facts = {"step": step, "time": time.time(), "result": entry(path / FINAL / MANIFEST)["sha256"]}
    write_text(path / FINISHED, json.dumps(facts))


def _finished(path: Path) -> tuple[int, str | None] | None:
    """The last step of a finished run, and the sha256 of its result's manifest; an older version wrote none."""
    try:
        facts = json.loads(read_text(path / FINISHED))
        return int(facts["step"]), facts.get("result")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        log.warning("%s cannot be read: the run is taken as not finished", path / FINISHED)
        return None


def _damage_of_result(path: Path) -> str:
    """What is wrong with the result of a finished run, as a clause; every byte of it is read."""
    final, found = path / FINAL, _finished(path)
    if found is None or (found[1] is None and final.is_dir()):
        return ""
    if not final.is_dir():
        return f"{FINAL} is missing"
    if wrong := damage(final, thorough=True, marker=MANIFEST):
        return f"{FINAL}: {wrong}"
    return "" if entry(final / MANIFEST)["sha256"] == found[1] else f"{FINAL}: {MANIFEST} is another one"


def _check_empty(path: Path) -> None:
    # what a run that was killed at its very start leaves, and what the web board notes of one that it starts
    own = {LOCK, f".{RESOLVED}.writing", STATUS, f".{STATUS}.writing", STARTED}
    strangers = sorted(entry.name for entry in path.iterdir() if entry.name not in own) if path.is_dir() else []
    if strangers:
        raise ConfigError(
            f"the folder is not empty and holds no run of halftune, but {', '.join(strangers[:3])}",
            where=str(path),
            remedy="choose another training.output_dir: a run would write over it",
        )


def _named(resume: str, loaded: LoadedConfig, *, thorough: bool = True) -> Path | None:
    """The checkpoint that ``resume`` names, of a run of the same configuration."""
    if resume in ("auto", "never"):
        return None
    path = Path(resume)
    if wrong := flaw(path, thorough=thorough):
        raise TrainingError(f"resume names {resume}, which is no valid checkpoint: {wrong}", remedy="resume: auto")
    if (path.parent / RESOLVED).is_file():
        now = flat(loaded.run.model_dump(mode="json"))
        refuse_differences(recorded(path.parent / RESOLVED), now, path.parent)
    return path


def _gone_on_from(path: Path, named: Path) -> Path:
    """The newest checkpoint of a run that was begun from ``named`` before; ``named`` where there is none."""
    for checkpoint in reversed(folders(path)):
        if flaw(checkpoint, thorough=True) or state_of(checkpoint)["began"] != str(named.resolve()):
            continue
        log.info("%s was begun from %s before, and has come to %s", path, named, checkpoint.name)
        return checkpoint
    return named


def set_aside(path: Path, why: str) -> None:
    """Moves what is in the way in a run folder to its ``set-aside``, where nothing is written over; says why."""
    if not path.exists():
        return
    place = path.parent / ASIDE / path.name
    if place.parent.is_symlink():
        remedy = "remove the link, or choose another training.output_dir"
        raise TrainingError("is a symbolic link: nothing is moved through it", where=str(place.parent), remedy=remedy)
    place.parent.mkdir(exist_ok=True)
    number = 1
    while place.exists():
        number += 1
        place = path.parent / ASIDE / f"{path.name}.{number}"
    path.rename(place)
    log.warning("%s moved to %s: %s", path, place, why)


def write_intent(folder: RunFolder, loaded: LoadedConfig, plan: Plan, data: DataReport) -> None:
    """Writes down what is about to run: the user's YAML, the resolved one, the plan and what the data is.

    Raises:
        TrainingError: the folder cannot be written.
    """
    try:
        if folder.damaged:
            set_aside(folder.path / FINAL, "it is damaged, and made anew")
        (folder.path / FINISHED).unlink(missing_ok=True)  # first: a run that was made longer is not finished any more
        write_text(folder.path / RESOLVED, resolved_yaml(loaded))  # makes it a run folder
        write_text(folder.path / "config.yaml", loaded.text)
        write_text(folder.path / "plan.json", json.dumps(to_dict(plan), indent=1))
        write_text(folder.path / "data_report.json", json.dumps(data.to_dict(), indent=1))
    except OSError as error:
        raise TrainingError(
            f"cannot write the run folder: {error.strerror}",
            where=str(folder.path),
            remedy=f"{first_aid(error)}, or choose another training.output_dir",
        ) from error
