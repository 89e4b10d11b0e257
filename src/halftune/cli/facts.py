"""What the verbs ask before they plan: the model of a recipe, also where a recipe it depends on makes it; processes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from halftune.config.load import LoadedConfig, load_config
from halftune.config.model_facts import ModelFacts, read_model_facts
from halftune.core.errors import PlanError


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


def world_size() -> int:
    """Processes of a run started here: ``WORLD_SIZE`` where a launcher has set it, else one.

    Raises:
        PlanError: the variable holds no count.
    """
    asked = os.environ.get("WORLD_SIZE") or "1"
    if not asked.isdecimal() or int(asked) < 1:
        what = f"{asked!r} is no number of processes"
        raise PlanError(what, where="WORLD_SIZE", remedy="start the run with torchrun, or unset the variable")
    return int(asked)
