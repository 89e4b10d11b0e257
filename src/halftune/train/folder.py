"""The run folder: what a run is, written down, and whether a new one may go there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from halftune.config.load import LoadedConfig
from halftune.config.render import resolved_yaml
from halftune.core.errors import ConfigError, TrainingError
from halftune.data.report import DataReport
from halftune.plan import Plan, to_dict
from halftune.train.checkpoint import MARKER, checkpoints

FINISHED = "finished.json"
LOCK = ".lock"
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
    "training.resume",
    "training.per_device_eval_batch_size",
    # The global batch must stay the same, which is checked where a checkpoint is restored; its split may change.
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "data.num_workers",
    "data.cache",
}
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


def open_folder(loaded: LoadedConfig) -> RunFolder:
    """Decides whether a run starts anew, goes on or is there already.

    Raises:
        ConfigError: the folder holds another run (says what differs), or ``resume: never`` meets a used folder.
        TrainingError: the checkpoint named by ``resume`` is none.
    """
    path, resume = Path(loaded.run.training.output_dir), loaded.run.training.resume
    resolved = path / "resolved.yaml"
    if not resolved.exists():
        strangers = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK) if path.is_dir() else []
        if strangers:
            raise ConfigError(
                f"the folder is not empty and holds no run of halftune, but {', '.join(strangers[:3])}",
                where=str(path),
                remedy="choose another training.output_dir: a run would write over it",
            )
        return RunFolder(path, _named(resume), finished=False)
    if resume == "never":
        raise ConfigError(
            "the folder holds a run already and resume is 'never'",
            where=str(path),
            remedy="choose another training.output_dir, or delete that folder",
        )
    before, now = _flat(yaml.safe_load(resolved.read_text(encoding="utf-8"))), _flat(loaded.run.model_dump(mode="json"))
    differences = _differences(before, now)
    if differences:
        raise ConfigError(
            f"the folder holds a run of another configuration: {'; '.join(differences)}",
            where=str(path),
            remedy="choose another training.output_dir, or set these back",
        )
    done = checkpoints(path)
    finished = (path / FINISHED).exists() and all(before[key] == now[key] for key in LENGTH)
    if (path / FINISHED).exists() and not finished and not done:
        raise ConfigError(
            "the run is finished and left no checkpoint to go on from (training.save_steps: end)",
            where=str(path),
            remedy="choose another training.output_dir",
        )
    return RunFolder(path, _named(resume) or (done[-1] if done else None), finished)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Makes the folder and holds it for this process, so that no second run writes into it.

    Raises:
        ConfigError: another process holds it.
        TrainingError: it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / LOCK)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            "another process is training in this folder",
            where=str(path),
            remedy="wait for it, stop it, or choose another training.output_dir",
        ) from error
    except OSError as error:
        raise TrainingError(
            f"cannot write the run folder: {error.strerror}",
            where=str(path),
            remedy="choose another training.output_dir",
        ) from error
    try:
        yield
    finally:
        lock.release()


def _named(resume: str) -> Path | None:
    if resume in ("auto", "never"):
        return None
    path = Path(resume)
    if not (path / MARKER).is_file():
        raise TrainingError(f"resume names {resume}, which is no complete checkpoint", remedy="resume: auto")
    return path


def _differences(before: dict[str, object], now: dict[str, object]) -> list[str]:
    return [
        f"{key} was {before.get(key)!r}, now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and key not in HARMLESS
        and not key.startswith(HARMLESS_SECTIONS)
        and key != "training.output_dir"
    ]


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
        (folder.path / "resolved.yaml").write_text(resolved_yaml(loaded), encoding="utf-8")  # makes it a run folder
        (folder.path / "config.yaml").write_text(loaded.text, encoding="utf-8")
        (folder.path / "plan.json").write_text(json.dumps(to_dict(plan), indent=1))
        (folder.path / "data_report.json").write_text(json.dumps(data.to_dict(), indent=1))
        (folder.path / FINISHED).unlink(missing_ok=True)
    except OSError as error:
        raise TrainingError(
            f"cannot write the run folder: {error.strerror}",
            where=str(folder.path),
            remedy="choose another training.output_dir",
        ) from error
