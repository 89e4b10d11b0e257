"""Checks the folders of model and tokenizer before importing torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from halftune.config.facts.config_file import config_file
from halftune.config.facts.folder import check_adapter, check_code, check_tokenizer, check_weights
from halftune.config.run import RunConfig
from halftune.config.sections.model import LoraAdapter, ModelSection
from halftune.model.files.result import check_written

BUILTIN = "builtin:"


def check_all_folders(
    run: RunConfig, *, thorough: bool = False, present: Callable[[ModelSection], ModelSection] = lambda model: model
) -> None:
    """Check the folders of a run's model and teacher, as ``check_folders``, and of the adapter that it starts from.

    Args:
        run: the recipe.
        thorough: as for ``check_folders``.
        present: gives what stands for a model that is not trained yet.
    """
    if isinstance(run.adapter, LoraAdapter) and run.adapter.name_or_path and Path(run.adapter.name_or_path).is_dir():
        check_adapter(Path(run.adapter.name_or_path))
    for model in (run.model, run.method.teacher_model):
        if model is not None:
            check_folders(present(model), thorough=thorough)


def check_folders(model: ModelSection, *, weights: bool = True, thorough: bool = False) -> None:
    """Check that local folders are complete and unchanged, and that a hub model is cached or reachable.

    Args:
        model: the model's config.
        weights: False if only the tokenizer is needed.
        thorough: compare the checksums of a model that halftune wrote, which reads every byte; else sizes only.

    Raises:
        ModelError: a model that halftune wrote has changed since; a weight file is missing, truncated or a pickle, code
            is not pinned, there is no tokenizer, or a hub model is neither cached nor reachable.
    """
    folder = Path(model.name_or_path)
    if weights and folder.is_dir():
        check_weights(folder)
        check_code(folder, model)
        check_written(folder, thorough=thorough)
    tokenizer = folder if model.tokenizer is None else Path(model.tokenizer)
    missing = not folder.is_dir() and not model.name_or_path.startswith(BUILTIN)
    if missing and (weights or model.tokenizer is None):
        config_file(model, catalogue=False)
    if tokenizer.is_dir():
        check_tokenizer(tokenizer)
        check_code(tokenizer, model)
