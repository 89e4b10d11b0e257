"""Opens what is evaluated: a run, one of its checkpoints, or a plain model or adapter. Weights are not read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from halftune.config.facts.folder import read_json
from halftune.config.load import load_config
from halftune.config.reading.names import looks_local
from halftune.core.errors import ConfigError, ModelError
from halftune.model.files.locate import locate
from halftune.model.files.result import FINAL
from halftune.model.result.completed_run import CompletedRun, open_checkpoint, open_run, with_inference_plan
from halftune.train.run_folder.checkpoints import STATE


@dataclass(frozen=True)
class Target:
    """A model to evaluate.

    Attributes:
        name: of its column.
        run: the run, or a plain model as if a run had left it.
        trained_here: whether it is a run's result, which has data of its own.
        base: whether its base model is evaluated, too.
    """

    name: str
    run: CompletedRun
    trained_here: bool
    base: bool


def open_targets(
    given: Sequence[str], overrides: Sequence[str], scratch: Path, *, base: bool | None
) -> tuple[Target, ...]:
    """Open the models of a command line, each under the plan of its run on this machine.

    Args:
        given: run folders, recipes, checkpoints, model folders, adapter folders or hub ids.
        overrides: ``key=value`` changes to the configuration of each.
        scratch: a folder where the results of checkpoints are written.
        base: whether base models are evaluated too; None: those of adapters.

    Raises:
        ModelError: one is a reward model, or cannot be found or planned.
        ConfigError: a plain model has no base to evaluate.
    """
    names = [_short(one) for one in given]
    found = []
    for number, (one, short) in enumerate(zip(given, names, strict=True)):
        run, trained_here = _open(one, overrides, scratch / str(number))
        if run.plan.method.head.value == "score":
            what = "the result is a reward model, which scores answers and predicts no tokens"
            remedy = "evaluate a model that was trained with another method"
            raise ModelError(what, where=one, remedy=remedy, code="infer.reward_model")
        if base and not (run.is_adapter or trained_here):
            what, remedy = "a plain model has no base model that is known", "name the base model itself, without --base"
            raise ConfigError(what, where=one, remedy=remedy, code="evaluate.no_base")
        name = one if names.count(short) > 1 else short
        found.append(Target(name, run, trained_here, run.is_adapter if base is None else base))
    return tuple(found)


def _short(target: str) -> str:
    path = Path(os.path.abspath(os.path.expanduser(target)))
    return (path.parent if path.name == FINAL else path).name


def _open(target: str, overrides: Sequence[str], scratch: Path) -> tuple[CompletedRun, bool]:
    path = Path(os.path.expanduser(target))
    if (path / STATE).is_file():
        return _checkpoint(path, overrides, scratch), True
    in_run = any((folder / "resolved.yaml").is_file() for folder in (path, path.absolute().parent))
    if in_run or path.suffix in (".yaml", ".yml"):
        return open_run(target, overrides, packed=True), True
    if (path / "adapter_config.json").is_file():
        return _adapter(path, overrides), False
    if not path.exists() and looks_local(target) and not target.startswith("builtin:"):
        what, remedy = "no such run, model folder or config file", "check the path"
        raise ModelError(what, where=target, remedy=remedy, code="model.not_found")
    return _plain(str(path) if path.is_dir() else target, overrides), False


def _checkpoint(path: Path, overrides: Sequence[str], scratch: Path) -> CompletedRun:
    from halftune.train.checkpoint.to_result import write_result  # imports torch

    run = open_checkpoint(path, overrides, scratch)
    write_result(path, run)
    return with_inference_plan(run.loaded, run.folder, scratch, is_adapter=run.is_adapter, packed=True)


def _plain(name: str, overrides: Sequence[str], adapter: Path | None = None) -> CompletedRun:
    recipe = {
        "model": {"name_or_path": name},
        "adapter": "none" if adapter is None else "lora",
        "data": {"train": "none.jsonl"},
        "training": {"output_dir": "none"},
    }
    with TemporaryDirectory() as folder:
        file = Path(folder) / "plain.yaml"
        file.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
        loaded = load_config(file, overrides, look_at_files=False)
    place = locate(loaded.run.model) if adapter is None else adapter
    return with_inference_plan(loaded, place, place, is_adapter=adapter is not None, packed=True)


def _adapter(path: Path, overrides: Sequence[str]) -> CompletedRun:
    base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
    if not isinstance(base, str):
        what, remedy = "adapter_config.json names no base model", "set base_model_name_or_path in it"
        raise ModelError(what, where=str(path), remedy=remedy, code="model.adapter_mismatch")
    return _plain(base, overrides, path)
