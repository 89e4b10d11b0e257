"""The model of a recipe as facts, also where a recipe that it depends on has yet to make it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from halftune.config.load import LoadedConfig, load_config
from halftune.config.model_facts import ModelFacts, read_model_facts


def dependencies(loaded: LoadedConfig) -> list[LoadedConfig]:
    """The recipes that must have been trained before this one, loaded, in order."""
    return [load_config(loaded.path.parent / recipe) for recipe in loaded.run.depends_on]


def model_facts(loaded: LoadedConfig) -> ModelFacts:
    """Facts of ``model.name_or_path``; before it has been trained, those of the recipe that will make it."""
    name = loaded.run.model.name_or_path
    if not Path(name).exists():
        for recipe in dependencies(loaded):
            if Path(name).is_relative_to(os.path.normpath(recipe.run.training.output_dir)):
                return replace(model_facts(recipe), name_or_path=name)
    return read_model_facts(loaded.run.model)
