"""What a run is made of: base model, tokenizer, chat template, data; and whether a checkpoint was made of the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from halftune.config.sections.model import ModelSection
from halftune.core.errors import ConfigError
from halftune.core.log import get_logger
from halftune.data.pipeline import PreparedData
from halftune.model.identity import model_identity, tokenizer_identity
from halftune.train.checkpoint import read_state

log = get_logger(__name__)

# What training.allow_changes may name → what it is called.
PARTS = {
    "model": "the base model",
    "tokenizer": "the tokenizer",
    "template": "the chat template",
    "train_data": "the training data",
    "eval_data": "the evaluation data",
}


def made_of(model: ModelSection, tokenizer: PreTrainedTokenizerBase, data: PreparedData) -> dict[str, Any]:
    """The identity of each of ``PARTS``, JSON-able; a checkpoint holds it.

    Raises:
        ModelError: the base model or the tokenizer cannot be read.
    """
    return {
        "model": model_identity(model),
        "tokenizer": tokenizer_identity(model),
        "template": _digest(tokenizer.chat_template),
        "train_data": list(data.fingerprints["train"]),
        "eval_data": list(data.fingerprints["eval"]),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def contents(made: dict[str, Any]) -> str:
    """One digest of everything, but for times and commits: the same on every machine that has the same files."""
    return _digest({**made, "model": _digests(made["model"])})


@dataclass(frozen=True)
class Changes:
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
        return not self.parts.isdisjoint(("tokenizer", "template", "train_data"))

    def say(self, *, main: bool) -> None:
        """Logs it, on the main process."""
        notes = [*self.notes, "the best evaluation so far no longer counts"] if self.parts else self.notes
        for note in notes if main else ():
            log.warning("%s", note)


UNCHANGED = Changes()


def check_made_of(now: dict[str, Any], allowed: Sequence[str], checkpoint: Path) -> Changes:
    """Compares what a checkpoint's run was made of with what this one is.

    Args:
        now: what :func:`made_of` gives.
        allowed: ``training.allow_changes``.
        checkpoint: what the run would go on from.

    Raises:
        ConfigError: something else has changed; names each.
        TrainingError: the checkpoint cannot be read.
    """
    before = read_state(checkpoint)["made_of"]
    if not isinstance(before, dict) or not PARTS.keys() <= before.keys():
        note = "the checkpoint does not say which model and data it was made with: they are not compared"
        return Changes(notes=(note,))
    changed = {part: what for part in PARTS if (what := "; ".join(_differences(part, before[part], now[part])))}
    if refused := [part for part in changed if part not in allowed]:
        raise ConfigError(
            f"not what the run began with: {'; '.join(f'{PARTS[part]} ({changed[part]})' for part in refused)}",
            where=str(checkpoint),
            remedy="put it back, start a new training.output_dir, "
            f"or go on with the change: training.allow_changes: [{', '.join([*allowed, *refused])}]",
        )
    notes = [f"{PARTS[part]} changed, which training.allow_changes permits: {what}" for part, what in changed.items()]
    if "model" not in changed:
        notes += _notes(before["model"], now["model"])
    return Changes(frozenset(changed), tuple(notes))


def _differences(part: str, before: Any, now: Any) -> Iterator[str]:
    if part == "model":
        before, now = (_digests(made) for made in (before, now))
    if not isinstance(now, dict):
        if before != now:
            yield f"sha256 {_shown(before)} before, {_shown(now)} now"
        return
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield f"{name} {'is new' if name not in before else 'is missing' if name not in now else 'has changed'}"


def _digests(made: dict[str, Any]) -> dict[str, str]:
    return {name: entry["digest"] for name, entry in made["files"].items()}


def _shown(identity: str | list[str]) -> str:
    return ", ".join(each[:12] for each in ([identity] if isinstance(identity, str) else identity)) or "none"


def _notes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What is another without another content."""
    if before["commit"] != now["commit"]:
        yield f"the base model's commit was {before['commit']}, now {now['commit']}; config and weights are the same"
        return
    for name, new in now["files"].items():
        old = before["files"].get(name, new)
        if now["commit"] is None and old.get("mtime_ns") != new.get("mtime_ns"):
            yield f"{name} of the base model was written again; its size and all sampled bytes are the same"
