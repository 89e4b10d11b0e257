"""The model of a recipe as facts, also where a recipe that it depends on has yet to make it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from halftune.config.facts.model import ModelFacts, read_model_facts
from halftune.config.load import LoadedConfig, load_config
from halftune.config.sections.model import ModelSection


def dependencies(loaded: LoadedConfig) -> list[LoadedConfig]:
    """The recipes that must have been trained before this one, loaded, in order."""
    return [load_config(loaded.path.parent / recipe) for recipe in loaded.run.depends_on]


def present_model(loaded: LoadedConfig) -> ModelSection:
    """The recipe's model; before it has been trained, that of the recipe that makes it, of the same architecture."""
    name = loaded.run.model.name_or_path
    if not Path(name).exists():
        for recipe in dependencies(loaded):
            if Path(name).is_relative_to(os.path.normpath(recipe.run.training.output_dir)):
                return present_model(recipe)
    return loaded.run.model


def model_facts(loaded: LoadedConfig) -> ModelFacts:
    """Facts of the present model, under the name of the recipe's."""
    model = loaded.run.model
    present = present_model(loaded)
    facts = read_model_facts(present)
    return facts if present is model else replace(facts, name_or_path=model.name_or_path)
