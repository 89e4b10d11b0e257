"""Starts training from the weights of an adapter, compared with the model and the recipe."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file

from halftune.config.facts.adapter import CONFIG, WEIGHTS, config_of, differences, settings_of
from halftune.config.facts.folder import check_adapter, read_json
from halftune.config.reading.names import looks_local
from halftune.config.run import RunConfig
from halftune.config.sections.model import LoraAdapter, ModelSection
from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.model.adapters import check_whole
from halftune.model.files.identity import check_base
from halftune.model.files.locate import download
from halftune.model.files.result import base_of_result
from halftune.plan.weights.targets import expression_limits, is_target

log = get_logger(__name__)


def load_start(adapted: PeftModel, adapter: LoraAdapter) -> None:
    """Copy the weights of ``adapter.name_or_path`` into a new adapter, in its dtypes.

    Raises:
        ModelError: there is no such adapter, or its settings, names or shapes differ from the recipe's or the model's.
    """
    assert adapter.name_or_path is not None
    folder = locate_adapter(adapter.name_or_path)
    raw = read_json(folder / CONFIG)
    settings = settings_of(raw, where=str(folder))
    for key, asked, stored in differences(adapter.model_dump(), settings):
        if key not in ("target_modules", "modules_to_save"):  # compared by the names of the weights
            what = f"adapter.{key} is {asked!r}, but the adapter has {stored!r}"
            remedy = f"set adapter.{key}: {stored}"
            raise ModelError(what, where=str(folder), remedy=remedy, code="model.adapter_mismatch")
    _check_excluded(adapted, raw.get("exclude_modules") or [], folder)
    check_whole(adapted, folder)
    own, stored = get_peft_model_state_dict(adapted, save_embedding_layers=False), load_file(folder / WEIGHTS)
    for name, tensor in stored.items():
        if tensor.shape != own[name].shape:
            what = f"{name} is {tuple(tensor.shape)} in the adapter, {tuple(own[name].shape)} in the model"
            remedy = "check that the adapter was trained on this base model"
            raise ModelError(what, where=str(folder), remedy=remedy, code="model.adapter_mismatch")
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(tensor)
    log.info("training starts from the adapter in %s", folder)


def _check_excluded(adapted: PeftModel, excluded: str | list[str], folder: Path) -> None:
    """Check that the adapter's config excludes no module that is adapted here.

    Raises:
        ModelError: names the first.
    """
    names: list[str] = sorted(adapted.base_model.targeted_module_names)  # type: ignore[arg-type,union-attr]
    with expression_limits(str(excluded)):
        found = [name for name in names if is_target(name, excluded)]
    if found:
        what = f"training cannot continue an adapter with exclude_modules: {str(excluded)[:80]} (it has {found[0]})"
        remedy = "use an adapter whose adapter_config.json has no exclude_modules"
        raise ModelError(what, where=str(folder), remedy=remedy, code="model.adapter_unsupported")


def locate_adapter(name: str) -> Path:
    """Return the folder of an adapter: local, or downloaded (a hub id).

    Raises:
        ModelError: not found, the hub is unreachable, or the folder has no safetensors adapter.
    """
    config_of(name, download=False)
    folder = Path(name)
    if not folder.is_dir():
        folder = download(name, ModelSection(name_or_path=name), (CONFIG, WEIGHTS))
    check_adapter(folder)
    return folder


def start_identity(name: str) -> dict[str, str]:
    """Return the SHA-256 of each file of the adapter that training starts from.

    Raises:
        ModelError: the adapter is missing.
    """
    folder = locate_adapter(name)
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (CONFIG, WEIGHTS)}


def check_start(config: RunConfig) -> None:
    """Check that the adapter that training starts from was trained on this base model.

    A result of halftune is compared by the base model's fingerprint, another adapter by its hub id, if it has one.

    Raises:
        ModelError: the base model differs, and ``training.allow_changes`` does not permit it.
    """
    assert isinstance(config.adapter, LoraAdapter)
    assert config.adapter.name_or_path is not None
    folder, allowed = locate_adapter(config.adapter.name_or_path), "model" in config.training.allow_changes
    if (recorded := base_of_result(folder)) is not None:
        check_base(recorded, config.model, allowed=allowed)
        return
    base, ours = read_json(folder / CONFIG).get("base_model_name_or_path"), config.model.name_or_path
    if not isinstance(base, str) or base == ours or any(looks_local(one) or Path(one).is_dir() for one in (base, ours)):
        return
    what = f"the adapter was trained on {base}, but model.name_or_path is {ours}"
    if not allowed:
        remedy = f"set model.name_or_path: {base}, or accept it with training.allow_changes: [model]"
        raise ModelError(what, where=str(folder), remedy=remedy, code="model.adapter_mismatch")
    log.warning("%s (accepted by training.allow_changes)", what)
