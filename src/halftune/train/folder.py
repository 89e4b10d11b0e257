"""The run folder: what a run is, written down, and whether a new one may go there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import ValidationError

from halftune.config.load import LoadedConfig
from halftune.config.render import resolved_yaml
from halftune.config.run import RunConfig
from halftune.core.atomic import clear_leftovers, write_text
from halftune.core.errors import ConfigError, TrainingError
from halftune.core.log import get_logger
from halftune.core.manifest import damage
from halftune.plan import Plan, to_dict
from halftune.train.checkpoint_list import folders, newest_valid
from halftune.train.lock import LOCK

if TYPE_CHECKING:
    from halftune.data.report import DataReport

log = get_logger(__name__)

FINISHED = "finished.json"
RESOLVED = "resolved.yaml"
# Keys that may change between two sittings of one run: they do not touch what is computed.
LENGTH = ("training.num_train_epochs", "training.max_steps")
HARMLESS = {
    *LENGTH,
    "training.logging_steps",
    "training.save_steps",
    "training.save_total_limit",
    "training.eval_steps",
    "training.early_stopping_patience",
    "training.load_best",
    "training.per_device_eval_batch_size",
    # The global batch must stay the same, which is checked where a checkpoint is restored; its split may change.
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "training.on_non_finite",
    "training.on_out_of_memory",
    "data.num_workers",
    "data.cache",
}
PLACES = ("training.output_dir", "training.resume")  # where, not what
HARMLESS_SECTIONS = ("logging.", "generation.", "depends_on")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: ``training.output_dir``.
        resume_from: the checkpoint to go on from, or None.
        finished: the run is there already, complete.
    """

    path: Path
    resume_from: Path | None
    finished: bool

    @property
    def final(self) -> Path:
        """The adapter or model that training leaves."""
        return self.path / "final"


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
    before, now = check_free(loaded), _flat(loaded.run.model_dump(mode="json"))
    if main:
        clear_leftovers(path)
    if before is None:
        return RunFolder(path, _named(resume, loaded), finished=False)
    if _is_done(path, longer=any(before.get(key) != now[key] for key in LENGTH)):
        return RunFolder(path, None, finished=True)
    if changed := _differences(before, now, harmless=True):
        log.info("changed since the run began, which is allowed: %s", "; ".join(changed))
    if resume != "auto":
        return RunFolder(path, _named(resume, loaded), finished=False)
    newest = newest_valid(path) if main else None
    if newest is None and main:
        log.info("%s has no checkpoint yet: the run begins anew", path)
    return RunFolder(path, newest, finished=False)


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
    if not _holds_results(path):
        return None
    if loaded.run.training.resume == "never":
        raise ConfigError(
            "the folder holds a run already and resume is 'never'",
            where=str(path),
            remedy="choose another training.output_dir, or delete that folder",
        )
    before = _recorded(path / RESOLVED)
    refuse_differences(before, _flat(loaded.run.model_dump(mode="json")), path)
    return before


def _holds_results(path: Path) -> bool:
    """Whether a run has left anything but its intent."""
    metrics = path / "metrics.jsonl"
    written = metrics.exists() and metrics.stat().st_size > 0
    kept = any((path / name).exists() for name in ("final", ".final.old", FINISHED, "set-aside"))
    return written or kept or bool(folders(path))


def identity(path: Path) -> tuple[int, int]:
    """Tells a folder from another one at the same path."""
    found = path.stat()
    return found.st_dev, found.st_ino


def check_still_there(path: Path, known: tuple[int, int]) -> None:
    """Called before something is saved: under an unmounted disk there is another folder, or none.

    Raises:
        TrainingError: the folder is not the one that :func:`identity` gave ``known`` for.
    """
    try:
        gone = identity(path) != known
    except OSError:
        gone = True
    if gone:
        raise TrainingError(
            "the run folder has vanished: its disk was unmounted, or the folder was moved or deleted",
            where=str(path),
            remedy="put it back and run the same command again: it goes on from the newest checkpoint in there",
        )


def _is_done(path: Path, *, longer: bool) -> bool:
    if finished_at(path) is None:
        return False
    if longer and not folders(path):
        raise ConfigError(
            "the run is finished and left no checkpoint to go on from (training.save_steps: end)",
            where=str(path),
            remedy="choose another training.output_dir",
        )
    return not longer


def finished_at(path: Path) -> int | None:
    """The last step of a finished run in this folder; None where there is none."""
    try:
        return int(json.loads((path / FINISHED).read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        log.warning("%s cannot be read: the run is taken as not finished", path / FINISHED)
        return None


def _check_empty(path: Path) -> None:
    own = {LOCK, f".{RESOLVED}.writing"}  # what a run that was killed at its very start leaves
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
    if wrong := damage(path, thorough=thorough):
        raise TrainingError(f"resume names {resume}, which is no valid checkpoint: {wrong}", remedy="resume: auto")
    if (path.parent / RESOLVED).is_file():
        now = _flat(loaded.run.model_dump(mode="json"))
        refuse_differences(_recorded(path.parent / RESOLVED), now, path.parent)
    return path


def _recorded(resolved: Path) -> dict[str, object]:
    """The flat configuration of a run folder, with today's defaults for keys that are younger than the run."""
    try:
        tree = yaml.safe_load(resolved.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _unreadable(resolved, str(error).splitlines()[0]) from error
    if not isinstance(tree, dict):
        raise _unreadable(resolved, "it is no mapping")
    try:
        return _flat(RunConfig.model_validate(tree).model_dump(mode="json"))
    except ValidationError:  # of another version: compared as it is written
        return _flat(tree)


def _unreadable(resolved: Path, why: str) -> ConfigError:
    remedy = "put the file back, or choose another training.output_dir"
    return ConfigError(f"what the run in this folder is cannot be read: {why}", where=str(resolved), remedy=remedy)


def refuse_differences(before: dict[str, object], now: dict[str, object], path: Path) -> None:
    """Raises where two flat configurations are not of one run.

    Raises:
        ConfigError: names every key that differs, with both values.
    """
    if differences := _differences(before, now, harmless=False):
        raise ConfigError(
            f"the folder holds a run of another configuration: {'; '.join(differences)}",
            where=str(path),
            remedy="choose another training.output_dir, or set these back",
        )


def _differences(before: dict[str, object], now: dict[str, object], *, harmless: bool) -> list[str]:
    return [
        f"{key} was {before.get(key)!r}, now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in PLACES and harmless == _is_harmless(key)
    ]


def _is_harmless(key: str) -> bool:
    return key in HARMLESS or key.startswith(HARMLESS_SECTIONS)


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    """Dotted key → value of every leaf; lists are leaves."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def write_intent(folder: RunFolder, loaded: LoadedConfig, plan: Plan, data: DataReport) -> None:
    """Writes down what is about to run: the user's YAML, the resolved one, the plan and what the data is.

    Raises:
        TrainingError: the folder cannot be written.
    """
    try:
        (folder.path / FINISHED).unlink(missing_ok=True)  # first: a run that was made longer is not finished any more
        write_text(folder.path / RESOLVED, resolved_yaml(loaded))  # makes it a run folder
        write_text(folder.path / "config.yaml", loaded.text)
        write_text(folder.path / "plan.json", json.dumps(to_dict(plan), indent=1))
        write_text(folder.path / "data_report.json", json.dumps(data.to_dict(), indent=1))
    except OSError as error:
        raise TrainingError(
            f"cannot write the run folder: {error.strerror}",
            where=str(folder.path),
            remedy="choose another training.output_dir",
        ) from error
