"""Facts about a recipe's model, which a dependency may not have trained yet."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from halftune.config.facts.model import ModelFacts, read_model_facts
from halftune.config.load import LoadedConfig, load_config
from halftune.config.run import RunConfig
from halftune.config.sections.model import ModelSection


def dependencies(loaded: LoadedConfig) -> list[LoadedConfig]:
    """Load the recipes that must be trained before this one, in order."""
    return [load_config(loaded.path.parent / recipe) for recipe in loaded.run.depends_on]


def present_model(loaded: LoadedConfig, of: ModelSection | None = None) -> ModelSection:
    """Return the recipe's model, or another of its models; if a dependency has yet to train it, the dependency's base
    model, which has the same architecture, with the first tokenizer set."""
    model = of or loaded.run.model
    if not Path(model.name_or_path).exists():
        for recipe in dependencies(loaded):
            if Path(model.name_or_path).is_relative_to(os.path.normpath(recipe.run.training.output_dir)):
                made_of = present_model(recipe)
                return made_of.model_copy(update={"tokenizer": model.tokenizer or made_of.tokenizer})
    return model


def model_facts(loaded: LoadedConfig) -> ModelFacts:
    """Return facts about the present model and its teacher, with the names in the recipe."""
    facts, teacher = _facts(loaded, loaded.run.model), loaded.run.method.teacher_model
    return facts if teacher is None else replace(facts, teacher=_facts(loaded, teacher))


def _facts(loaded: LoadedConfig, model: ModelSection) -> ModelFacts:
    present = present_model(loaded, model)
    facts = read_model_facts(present)
    return facts if present is model else replace(facts, name_or_path=model.name_or_path)


def run_facts(run: RunConfig, model: ModelSection | None = None) -> ModelFacts:
    """Return facts about a run's model, or the one given in its place, and its teacher.

    Raises:
        ModelError: as ``read_model_facts``.
    """
    facts, teacher = read_model_facts(model or run.model), run.method.teacher_model
    return facts if teacher is None else replace(facts, teacher=read_model_facts(teacher))
