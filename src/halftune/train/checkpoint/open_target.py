"""Opens whatever holds a model: a run, one of its checkpoints, an adapter or a plain model. Weights are not read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from halftune.config.facts.folder import read_json
from halftune.config.load import load_config
from halftune.config.reading.names import looks_local
from halftune.core.errors import ModelError
from halftune.model.files.target import ADAPTER, identify
from halftune.model.result.completed_run import (
    CompletedRun,
    check_settled,
    open_checkpoint,
    open_run,
    with_inference_plan,
)


def open_target(
    given: str, overrides: Sequence[str], scratch: Path, *, packed: bool = False, named: bool = False
) -> tuple[CompletedRun, bool]:
    """Open a model with an inference plan on this machine.

    Args:
        given: a run folder, its ``final``, its recipe, a checkpoint, an adapter folder, or a model folder.
        overrides: ``key=value`` changes to the configuration.
        scratch: a folder for the result of a checkpoint, which is written now.
        packed: as of ``resolve_inference``.
        named: also open builtin models and hub ids.

    Returns:
        The run, or a plain model as if a run had left it; and whether a run made it.

    Raises:
        ModelError: it is none of these, or cannot be read or planned.
    """
    target = identify(given, "run", "checkpoint", "adapter", "model", *(("name",) if named else ()))
    if target.kind == "run":
        return open_run(str(target.path), overrides, packed=packed), True
    if target.kind == "checkpoint":
        from halftune.train.checkpoint.to_result import write_result  # imports torch

        run = open_checkpoint(target.path, overrides, scratch)
        write_result(target.path, run)
        return with_inference_plan(run.loaded, run.folder, scratch, is_adapter=run.is_adapter, packed=packed), True
    if target.kind == "adapter":
        return _plain(_base_of(target.path), overrides, packed, target.path), False
    if target.kind == "name" and looks_local(given) and not given.startswith("builtin:"):
        what, remedy = "no such run, model folder or config file", "check the path"
        raise ModelError(what, where=given, remedy=remedy, code="model.not_found")
    return _plain(str(target.path) if target.kind == "model" else given, overrides, packed), False


def _plain(name: str, overrides: Sequence[str], packed: bool, adapter: Path | None = None) -> CompletedRun:
    from halftune.model.files.locate import locate  # imports torch

    recipe: dict[str, Any] = {
        "model": {"name_or_path": name},
        "adapter": "none" if adapter is None else "lora",
        "data": {"train": "none.jsonl"},
        "training": {"output_dir": "none"},
    }
    if adapter is not None and any((adapter / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        recipe["model"]["tokenizer"] = str(adapter)  # the command line may name another one
    with TemporaryDirectory() as folder:
        file = Path(folder) / "plain.yaml"
        file.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
        loaded = load_config(file, overrides, look_at_files=False)
    check_settled(loaded, ("adapter", "method", "training"))
    place = locate(loaded.run.model) if adapter is None else adapter
    return with_inference_plan(loaded, place, place, is_adapter=adapter is not None, packed=packed, plain=True)


def _base_of(adapter: Path) -> str:
    base = read_json(adapter / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str):
        what, remedy = "adapter_config.json names no base model", "set base_model_name_or_path in it"
        raise ModelError(what, where=str(adapter), remedy=remedy, code="model.adapter_mismatch")
    return base
