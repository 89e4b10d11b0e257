"""Checks of `plan` and `train` for what would stop a run on this machine, before torch is imported."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from halftune.config.facts.media import check_processor, check_torchvision
from halftune.config.facts.model import ModelFacts
from halftune.config.load import LoadedConfig
from halftune.config.optimizers import OPTIMIZERS, Optim
from halftune.config.recipe_facts import present_model
from halftune.config.run import RunConfig
from halftune.config.sections.model import NoAdapter
from halftune.config.weight_formats import WEIGHT_FORMATS
from halftune.core.errors import MissingPackageError, ModelError
from halftune.core.optional import pip_line, version_of
from halftune.data.preflight import validate_data
from halftune.model.files.preflight import check_all_folders
from halftune.plan.memory import check_fits
from halftune.plan.tree import MemoryPlan
from halftune.train.run_folder.start_or_resume import check_free


def check_outcome(loaded: LoadedConfig, memory: MemoryPlan, *, here: bool = True) -> None:
    """Check that a run may use its folder and is expected to fit, after the plan was printed.

    Args:
        loaded: the recipe.
        memory: its memory estimate.
        here: whether the run is for this machine, so that its folder is checked.

    Raises:
        HalftuneError: what training would stop at; the first of it.
    """
    if here:
        check_free(loaded)
    check_fits(memory, loaded.run)


def check_inputs(loaded: LoadedConfig, facts: ModelFacts, *, here: bool = True, thorough: bool = False) -> None:
    """Check the folders of model and tokenizer, the packages that the checkpoint requires, and the data.

    Args:
        loaded: the recipe.
        facts: its model.
        here: whether the run is for this machine, so that its packages are checked.
        thorough: whether to verify the checksums of a model that halftune wrote.

    Raises:
        HalftuneError: what training would stop at; the first of it.
    """
    run, teacher = loaded.run, facts.teacher
    check_all_folders(run, thorough=thorough, present=partial(present_model, loaded))
    if run.data.media and Path(run.model.name_or_path).is_dir():
        check_processor(Path(run.model.name_or_path))
    if loaded.run.training.router_aux_loss_coef and "expert" not in json.dumps(facts.raw, default=str):
        what = f"{facts.model_type} has no load-balancing loss: its config.json names no experts"
        where = "training.router_aux_loss_coef"
        raise ModelError(what, where=where, remedy="remove the key", code="model.no_router_loss")
    if here:
        if run.data.images:
            check_torchvision(facts.model_type)
        _check_optimizer(run.training.optim)
        _check_float8(run)
        _check_format(facts.quantization or run.model.quantization)
        if teacher is not None and run.method.teacher_model is not None:
            _check_format(teacher.quantization or run.method.teacher_model.quantization)
    validate_data(run)


def _check_format(stored: str) -> None:
    package = WEIGHT_FORMATS[stored].package if stored in WEIGHT_FORMATS else ""
    if package and version_of(package) is None:
        what = f"{stored} weights require package {package}"
        raise MissingPackageError(what, remedy=pip_line(package), code="core.package_missing")


def _check_float8(run: RunConfig) -> None:
    asked = run.precision.linear == "fp8" and run.precision.on_unsupported == "error"
    if asked and isinstance(run.adapter, NoAdapter) and version_of("torchao") is None:
        what = "precision.linear: fp8 with adapter: none requires package torchao"
        raise MissingPackageError(what, remedy=pip_line("torchao"), code="core.package_missing")


def _check_optimizer(optim: Optim) -> None:
    package = OPTIMIZERS[optim].package
    if package and version_of(package) is None:
        what = f"optim: {optim} requires package {package}"
        raise MissingPackageError(what, remedy=pip_line(package), code="core.package_missing")
    version, needed = version_of("torch") or "0", OPTIMIZERS[optim].since_torch
    if tuple(int(part) for part in version.split(".")[:2]) < needed:
        what = f"optim: {optim} requires torch {needed[0]}.{needed[1]} or newer (installed: {version})"
        newer = pip_line(f"'torch>={needed[0]}.{needed[1]}'")
        raise MissingPackageError(what, remedy=newer, code="core.package_missing")
