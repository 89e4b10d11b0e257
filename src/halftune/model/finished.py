"""Finds what a finished run left and resolves its plan on this machine, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halftune.config.load import LoadedConfig, load_config, load_run
from halftune.config.model import ModelSection
from halftune.config.model_facts import ModelFacts, read_model_facts
from halftune.config.run import RunConfig
from halftune.config.shipped import find
from halftune.core.errors import ModelError, PlanError
from halftune.core.log import get_logger
from halftune.hardware.probe import probe
from halftune.plan import Plan, resolve

log = get_logger(__name__)


@dataclass(frozen=True)
class FinishedRun:
    """A run with a result.

    Attributes:
        loaded: its resolved configuration, with the caller's overrides.
        folder: the run folder.
        plan: how this machine carries the run's configuration out.
        is_adapter: whether ``final`` holds an adapter (else a full model).
    """

    loaded: LoadedConfig
    folder: Path
    plan: Plan
    is_adapter: bool

    @property
    def final(self) -> Path:
        """The adapter or model that training left."""
        return self.folder / "final"

    @property
    def result(self) -> ModelSection:
        """The model to load: an adapter's base, or the trained model itself; the tokenizer as it was trained with."""
        base = self.loaded.run.model
        changes: dict[str, object] = {"tokenizer": str(self.final), "chat_template": None}
        if not self.is_adapter:
            changes |= {"name_or_path": str(self.final), "revision": None}
        return base.model_copy(update=changes)


def open_run(target: str, overrides: Sequence[str] = ()) -> FinishedRun:
    """The finished run in a folder, or of a recipe.

    Args:
        target: a run folder, its ``final``, or a YAML file (its ``training.output_dir`` is the run folder).
        overrides: ``key=value`` changes to the run's configuration for this session, e.g. ``attention=sdpa``.

    Raises:
        ModelError: there is no run, or it has no result yet.
        HalftuneError: the configuration cannot be carried out on this machine.
    """
    folder = _folder(Path(target).expanduser())
    loaded = load_run(folder, overrides, look_at_files=False)  # the data it was trained on need not be here
    final = folder / "final"
    is_adapter = (final / "adapter_config.json").is_file()
    if not is_adapter and not (final / "config.json").is_file():
        remedy = f"train it to the end: train --config {folder / 'config.yaml'}"
        raise ModelError("the run has no result yet (final/)", where=str(folder), remedy=remedy)
    section = loaded.run.model if is_adapter else loaded.run.model.model_copy(update={"name_or_path": str(final)})
    plan = _plan(loaded.run, read_model_facts(section), asked=any(key.startswith("attention") for key in overrides))
    return FinishedRun(loaded, folder, plan, is_adapter)


def _plan(config: RunConfig, facts: ModelFacts, *, asked: bool) -> Plan:
    """The plan on this machine. Attention that was asked for in training need not exist here: unless it is ``asked``
    for now, another backend answers the same but for rounding.
    """
    hardware = probe()
    try:
        return resolve(config, hardware, facts)
    except PlanError as error:
        if error.where != "attention" or asked:
            raise
        log.warning("%s; this machine's own choice instead", error.what)
        own = config.attention.model_copy(update={"backend": "auto"})
        return resolve(config.model_copy(update={"attention": own}), hardware, facts)


def _folder(target: Path) -> Path:
    if target.is_dir():
        for folder in (target, target.parent):
            if (folder / "resolved.yaml").is_file():
                return folder
        remedy = "write a run folder (training.output_dir) or the recipe's YAML file"
        raise ModelError("not a run folder: it has no resolved.yaml", where=str(target), remedy=remedy)
    target = find(target)
    if not target.is_file():
        raise ModelError("no such run folder or recipe", where=str(target), remedy="check the path")
    folder = Path(load_config(target, look_at_files=False).run.training.output_dir)
    if not (folder / "resolved.yaml").is_file():
        remedy = f"train it first: train --config {target}"
        raise ModelError(f"this recipe has not been trained: nothing in {folder}", where=str(target), remedy=remedy)
    return folder
