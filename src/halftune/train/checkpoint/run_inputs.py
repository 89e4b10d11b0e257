"""What a run is made of: base model, tokenizer, chat template, data; and whether a checkpoint was made of the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from halftune.config.facts.safetensors_headers import weight_files
from halftune.config.run import RunConfig
from halftune.config.sections.method import Method
from halftune.config.sections.model import AdapterSection, LoraAdapter, ModelSection
from halftune.core.errors import ConfigError, ModelError, TrainingError
from halftune.core.files import MOST_JSON, read_json
from halftune.core.log import get_logger
from halftune.data.pipeline import PreparedData
from halftune.model.files.identity import (
    differing,
    digests,
    is_identity,
    model_differences,
    model_identity,
    model_notes,
    processor_identity,
    tokenizer_identity,
)
from halftune.model.files.locate import locate
from halftune.train.callbacks.environment import NAME as ENVIRONMENT
from halftune.train.checkpoint.checkpoint import read_state
from halftune.train.run_folder.checkpoints import checkpoints, intact

log = get_logger(__name__)

# What training.allow_changes may name → what it is called.
PARTS = {
    "model": "the base model",
    "adapter": "the adapter that training starts from",
    "tokenizer": "the tokenizer",
    "template": "the chat template",
    "processor": "the image processor",
    "train_data": "the training data",
    "eval_data": "the evaluation data",
    "rewards": "the reward functions",
    "teacher": "the teacher",
}


def run_inputs(config: RunConfig, tokenizer: PreTrainedTokenizerBase, data: PreparedData) -> dict[str, Any]:
    """The identity of each of ``PARTS``, and the day that the chat template writes, JSON-able; a checkpoint holds it.

    Raises:
        ModelError: the base model, the adapter or the tokenizer cannot be read.
    """
    model, teacher = config.model, config.method.teacher_model
    return {
        "model": model_identity(model),
        "adapter": _start(config.adapter),
        "tokenizer": tokenizer_identity(model),
        "template": _digest(tokenizer.chat_template),
        "processor": processor_identity(model) if config.data.media else {},
        "train_data": list(data.fingerprints["train"]),
        "eval_data": list(data.fingerprints["eval"]),
        "rewards": _rewards(config.method),
        "teacher": digests(model_identity(teacher)) if teacher is not None else {},
        "day": data.day,
        "adapter_form": adapter_form(config.adapter),
    }


class BaseFiles:
    """Notices weight files that are written while they are in use: on a CPU, weights in memory are pages of them.

    A file that replaces another leaves those pages as they are.

    Args:
        model: the base model.
        identity: what it was when the run began.
    """

    def __init__(self, model: ModelSection, identity: dict[str, Any]) -> None:
        self._model, self._identity = model, identity
        self._seen = self._now()

    def check(self, folder: Path) -> None:
        """Called before something is written to the run folder.

        Raises:
            ModelError: a file has another content.
        """
        now = self._now()
        written = [path for path, seen in self._seen.items() if path in now and _in_place(seen, now[path])]
        if written and (changed := "; ".join(model_differences(self._identity, model_identity(self._model)))):
            what = f"the base model was written to during training, which uses its pages: {changed}"
            remedy = f"restore it and run the same command again; nothing was saved, {intact(folder)}"
            raise ModelError(what, where=str(written[0]), remedy=remedy, code="model.base_changed")
        self._seen = {path: now.get(path, seen) if path in written else seen for path, seen in self._seen.items()}

    def _now(self) -> dict[Path, os.stat_result]:
        try:
            return {path: path.stat() for path in weight_files(locate(self._model))}
        except (OSError, ModelError):  # gone: the pages are not
            return {}


def _in_place(before: os.stat_result, now: os.stat_result) -> bool:
    changed = (before.st_size, before.st_mtime_ns) != (now.st_size, now.st_mtime_ns)
    return changed and (before.st_dev, before.st_ino) == (now.st_dev, now.st_ino)


def _start(adapter: AdapterSection) -> dict[str, str]:
    if not isinstance(adapter, LoraAdapter) or adapter.name_or_path is None:
        return {}
    from halftune.model.adapters.start import start_identity  # few runs start from an adapter

    return start_identity(adapter.name_or_path)


def _rewards(method: Method) -> dict[str, str]:
    """sha256 of the files of reward functions; one that cannot be read is an error where it is run."""
    files = dict.fromkeys(Path(one.file).resolve() for one in getattr(method, "rewards", ()) if one.file is not None)
    found: dict[str, str] = {}
    for number, path in enumerate((path for path in files if path.is_file()), start=1):
        name = f"{path.name} ({number})" if path.name in found else path.name  # of another folder
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def adapter_form(adapter: AdapterSection) -> dict[str, Any]:
    """What turns an adapter's weights into an update, JSON-able; its dropout and its start do not."""
    return adapter.model_dump(mode="json", exclude={"dropout", "name_or_path"})


def template_date(folder: Path, resume_from: Path | None) -> str | None:
    """The date that the chat template writes in a resumed run; None in a new run, or if it writes no date.

    Args:
        folder: the run folder; only the main process knows which of its checkpoints is gone on from.
        resume_from: the checkpoint, where it is known.

    Raises:
        TrainingError: the checkpoint cannot be read.
    """
    for checkpoint in [resume_from] if resume_from is not None else reversed(checkpoints(folder)):
        try:
            made = read_state(checkpoint).get("made_of")
        except TrainingError:
            if checkpoint == resume_from:
                raise
            continue  # all checkpoints of a run have one date
        return made.get("day") if isinstance(made, dict) else None
    return None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def contents(made: dict[str, Any]) -> str:
    """One digest of everything, but for times and commits: the same on every machine that has the same files."""
    return _digest({**made, "model": digests(made["model"])})


@dataclass(frozen=True)
class InputChanges:
    """What is another than when a checkpoint was written.

    Attributes:
        parts: those of ``PARTS`` that have changed, which is allowed.
        notes: sentences for the log.
    """

    parts: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> bool:
        """Whether the training data may be other tokens now."""
        return not self.parts.isdisjoint(("tokenizer", "template", "processor", "train_data"))

    def warn(self, *, main: bool) -> None:
        """Logs it, on the main process."""
        notes = [*self.notes, "the best evaluation so far no longer counts"] if self.parts else self.notes
        for note in notes if main else ():
            log.warning("%s", note)


UNCHANGED = InputChanges()


def check_same_inputs(now: dict[str, Any], allowed: Sequence[str], checkpoint: Path) -> InputChanges:
    """Compares what a checkpoint's run was made of with what this one is.

    Args:
        now: what :func:`run_inputs` gives.
        allowed: ``training.allow_changes``.
        checkpoint: what the run would go on from.

    Raises:
        ConfigError: something else has changed; names each.
        TrainingError: the checkpoint cannot be read.
    """
    before = read_state(checkpoint)["made_of"]
    if not _is_complete(before):
        note = "the checkpoint does not record its model and data: they are not compared"
        return InputChanges(notes=(note,))
    changed = _changed(before, now)
    if refused := [part for part in changed if part not in allowed]:
        raise ConfigError(
            f"changed since the checkpoint: {'; '.join(f'{PARTS[part]} ({changed[part]})' for part in refused)}",
            where=str(checkpoint),
            remedy="restore it, start a new training.output_dir, "
            f"or allow the change: training.allow_changes: [{', '.join([*allowed, *refused])}]",
            code="train.run_changed",
        )
    notes = [f"{PARTS[part]} changed, which training.allow_changes permits: {what}" for part, what in changed.items()]
    if "model" not in changed:
        notes += model_notes(before["model"], now["model"])
    return InputChanges(frozenset(changed), tuple(notes))


def warn_other_inputs(now: dict[str, Any], run: Path) -> None:
    """Warn if the inputs of a ``--rerun`` differ from the old run's. The rerun starts from the beginning.

    Args:
        now: what :func:`run_inputs` gives.
        run: the folder of the run that is repeated.
    """
    try:
        before = read_json(run / ENVIRONMENT, MOST_JSON)
    except (OSError, ValueError):
        before = None
    if not _is_complete(before):
        log.warning("%s does not record its model and data: they are not compared", run)
        return
    for part, what in _changed(before, now).items():
        log.warning("%s differs from that of %s: %s", PARTS[part], run, what)


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Those of ``PARTS`` that differ → in what."""
    return {part: what for part in PARTS if (what := "; ".join(_differences(part, before.get(part, {}), now[part])))}


def _is_complete(made: Any) -> TypeGuard[dict[str, Any]]:
    return (
        isinstance(made, dict)
        and is_identity(made.get("model"))
        and isinstance(made.get("tokenizer"), dict)
        and isinstance(made.get("template"), str)
        and all(_are_texts(made.get(part)) for part in ("train_data", "eval_data"))
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _differences(part: str, before: Any, now: Any) -> Iterator[str]:
    if part == "model":
        yield from model_differences(before, now)
    elif isinstance(now, dict):
        yield from differing(before, now)
    elif before != now:
        yield f"sha256 {_shown(before)} before, {_shown(now)} now"


def _shown(identity: str | list[str]) -> str:
    return ", ".join(each[:12] for each in ([identity] if isinstance(identity, str) else identity)) or "none"
