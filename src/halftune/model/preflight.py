"""Looks at a model's and its tokenizer's folder before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from halftune.config.facts.folder import check_code, check_tokenizer, check_weights
from halftune.config.sections.model import ModelSection


def check_folders(model: ModelSection, *, weights: bool = True) -> None:
    """Makes sure that local folders hold what will be loaded from them; hub ids and builtin models are left to it.

    Args:
        model: which folders.
        weights: False where only the tokenizer is needed.

    Raises:
        ModelError: a weight file is missing or cut off, is a pickle, or code is not pinned; or there is no tokenizer.
    """
    folder = Path(model.name_or_path)
    if weights and folder.is_dir():
        check_weights(folder)
        check_code(folder, model)
    tokenizer = folder if model.tokenizer is None else Path(model.tokenizer)
    if tokenizer.is_dir():
        check_tokenizer(tokenizer)
        check_code(tokenizer, model)
