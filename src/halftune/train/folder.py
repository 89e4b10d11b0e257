"""The run folder: what a run is, written down, and whether a new one may go there."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from halftune.config.load import LoadedConfig
from halftune.config.render import resolved_yaml
from halftune.core.errors import ConfigError, TrainingError
from halftune.plan import Plan, to_dict
from halftune.train.checkpoint import MARKER, checkpoints

FINISHED = "finished.json"
# Keys that may change between two sittings of one run: they do not touch what is computed.
HARMLESS = {
    "training.num_train_epochs",
    "training.max_steps",
    "training.logging_steps",
    "training.save_steps",
    "training.save_total_limit",
    "training.eval_steps",
    "training.early_stopping_patience",
    "training.load_best",
    "training.resume",
    "training.per_device_eval_batch_size",
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
        return RunFolder(path, _named(resume), finished=False)
    if resume == "never":
        raise ConfigError(
            "the folder holds a run already and resume is 'never'",
            where=str(path),
            remedy="choose another training.output_dir, or delete that folder",
        )
    differences = _differences(yaml.safe_load(resolved.read_text()), loaded.run.model_dump(mode="json"))
    if differences:
        raise ConfigError(
            f"the folder holds a run of another configuration: {'; '.join(differences)}",
            where=str(path),
            remedy="choose another training.output_dir, or set these back",
        )
    done = checkpoints(path)
    return RunFolder(path, _named(resume) or (done[-1] if done else None), finished=(path / FINISHED).exists())


def _named(resume: str) -> Path | None:
    if resume in ("auto", "never"):
        return None
    path = Path(resume)
    if not (path / MARKER).is_file():
        raise TrainingError(f"resume names {resume}, which is no complete checkpoint", remedy="resume: auto")
    return path


def _differences(before: dict, now: dict) -> list[str]:
    before_flat, now_flat = dict(_flatten(before)), dict(_flatten(now))
    keys = sorted(before_flat.keys() | now_flat.keys())
    return [
        f"{key} was {before_flat.get(key)!r}, now {now_flat.get(key)!r}"
        for key in keys
        if before_flat.get(key) != now_flat.get(key)
        and key not in HARMLESS
        and not key.startswith(HARMLESS_SECTIONS)
        and key != "training.output_dir"
    ]


def _flatten(tree: object, prefix: str = "") -> list[tuple[str, object]]:
    if not isinstance(tree, dict):
        return [(prefix, json.loads(json.dumps(tree)))]
    return [leaf for key, value in tree.items() for leaf in _flatten(value, f"{prefix}.{key}" if prefix else key)]


def write_intent(folder: RunFolder, loaded: LoadedConfig, plan: Plan) -> None:
    """Writes down what is about to run: the user's YAML, the resolved one and the plan.

    Raises:
        TrainingError: the folder cannot be written.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        (folder.path / "config.yaml").write_text(loaded.text)
        (folder.path / "resolved.yaml").write_text(resolved_yaml(loaded))
        (folder.path / "plan.json").write_text(json.dumps(to_dict(plan), indent=1))
        (folder.path / FINISHED).unlink(missing_ok=True)
    except OSError as error:
        raise TrainingError(
            f"cannot write the run folder: {error.strerror}",
            where=str(folder.path),
            remedy="choose another training.output_dir",
        ) from error


def replace_folder(target: Path, beside: Path) -> None:
    """Puts a complete folder in the place of another one."""
    if target.exists():
        shutil.rmtree(target)
    beside.rename(target)
