"""Finds what a finished run left and resolves the plan of its answers on this machine, without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from halftune.config.facts.folder import check_adapter, read_json
from halftune.config.facts.model import ModelFacts, read_model_facts
from halftune.config.facts.safetensors_headers import main_format, read_header
from halftune.config.load import LoadedConfig, load_config, load_run
from halftune.config.reading.overrides import COMMAND_LINE
from halftune.config.rules.finding import looks_local
from halftune.config.run import RunConfig
from halftune.config.sections.model import ModelSection
from halftune.config.shipped import find
from halftune.core.errors import ModelError, PlanError
from halftune.core.formats import Format
from halftune.core.log import get_logger
from halftune.hardware.facts import Hardware
from halftune.hardware.probe import probe
from halftune.plan import Plan, resolve
from halftune.plan.inference import resolve_inference

log = get_logger(__name__)


@dataclass(frozen=True)
class FinishedRun:
    """A run with a result.

    Attributes:
        loaded: its resolved configuration, with the caller's overrides.
        folder: the run folder.
        plan: how the result answers on this machine; of a checkpoint, how this machine trains it.
        is_adapter: whether ``final`` holds an adapter (else a full model).
        place: of the result, where it is not in the run folder.
    """

    loaded: LoadedConfig
    folder: Path
    plan: Plan
    is_adapter: bool
    place: Path | None = None

    @property
    def final(self) -> Path:
        """The adapter or model that training left."""
        return self.place or self.folder / "final"

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
    folder = _folder(Path(os.path.expanduser(target)))
    loaded = load_run(folder, overrides, look_at_files=False)  # the data it was trained on need not be here
    final = folder / "final"
    is_adapter = (final / "adapter_config.json").is_file()
    if not is_adapter and not (final / "config.json").is_file():
        remedy = f"train it to the end: train --config {folder / 'config.yaml'}"
        raise ModelError("the run has no result yet (final/)", where=str(folder), remedy=remedy)
    if is_adapter:
        _check_base(loaded, final)
    section = loaded.run.model if is_adapter else loaded.run.model.model_copy(update={"name_or_path": str(final)})
    stored = _adapter_format(final) if is_adapter else None
    plan = _plan(loaded, read_model_facts(section), folder, partial(resolve_inference, adapter=stored))
    return FinishedRun(loaded, folder, plan, is_adapter)


def open_checkpoint(checkpoint: Path, overrides: Sequence[str], place: Path) -> FinishedRun:
    """A run as if it had ended at one of its checkpoints.

    Args:
        checkpoint: a folder in the run folder.
        overrides: as :func:`open_run`'s.
        place: where its result is going to be.

    Raises:
        ModelError: the checkpoint is in no run folder.
        HalftuneError: the configuration cannot be carried out on this machine.
    """
    folder = _folder(checkpoint.resolve().parent)
    loaded = load_run(folder, overrides, look_at_files=False)
    plan = _plan(loaded, read_model_facts(loaded.run.model), folder, resolve)
    return FinishedRun(loaded, folder, plan, loaded.run.adapter.type != "none", place)


def _check_base(loaded: LoadedConfig, final: Path) -> None:
    """Makes sure that a run's adapter is of the run's model, where both have names that do not depend on a folder.

    Raises:
        ModelError: it is of another model, or its files are missing or damaged.
    """
    check_adapter(final)
    base, ours = read_json(final / "adapter_config.json").get("base_model_name_or_path"), loaded.run.model.name_or_path
    if (
        not isinstance(base, str)
        or base == ours
        or any(looks_local(name) or Path(name).is_dir() for name in (base, ours))
    ):
        return
    what = f"the adapter was trained on {base}, and the run's model is {ours}"
    if loaded.origins["model.name_or_path"] == COMMAND_LINE:
        log.warning("%s: %s", final, what)
    else:
        raise ModelError(what, where=str(final), remedy=f"model.name_or_path={base}, or the adapter that belongs to it")


def _adapter_format(final: Path) -> Format:
    """The format of an adapter's file; fp32 where it is none of ours."""
    found = main_format(read_header(final / "adapter_model.safetensors"))
    return {"bf16": "bf16", "fp16": "fp16"}.get(found or "", "fp32")  # pyright: ignore[reportReturnType]


def _plan(
    loaded: LoadedConfig, facts: ModelFacts, folder: Path, resolve: Callable[[RunConfig, Hardware, ModelFacts], Plan]
) -> Plan:
    """The plan on this machine, in the number format of training.

    That format and the attention of training need not exist here: unless they are asked for now, they give way to this
    machine's own choice, and a line says so.
    """
    hardware, config = probe(), loaded.run
    given = {part for part, key in _GIVES_WAY.items() if loaded.origins[f"{part}.{key}"] == COMMAND_LINE}
    trained = config.precision.compute if "precision" in given else _compute_of_training(folder, config)
    config = _with(config, "precision", trained)
    for part in _GIVES_WAY:
        try:
            resolve(config, hardware, facts)
        except PlanError as error:
            for problem in error.problems:
                if problem.where == part and part not in given:
                    log.warning("unlike in training: %s; this machine's own choice instead", problem.what)
                    config = _with(config, part, "auto")
    plan = resolve(config, hardware, facts)
    compute = plan.precision.compute
    if config.precision.compute not in ("auto", compute.value):  # precision.on_unsupported: fallback
        log.warning("unlike in training: %s", compute.reason)
    return plan


_GIVES_WAY = {"precision": "compute", "attention": "backend"}  # section → its key, in the order of decisions


def _with(config: RunConfig, part: str, value: str) -> RunConfig:
    section = config.precision if part == "precision" else config.attention
    return config.model_copy(update={part: section.model_copy(update={_GIVES_WAY[part]: value})})


def _compute_of_training(folder: Path, config: RunConfig) -> str:
    """The compute dtype that training's plan came to; what the recipe says where there is no such record."""
    try:
        recorded = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["precision"]["compute"]["value"]
    except (OSError, ValueError, LookupError, TypeError):
        return config.precision.compute
    return recorded if recorded in get_args(Format) else config.precision.compute


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
