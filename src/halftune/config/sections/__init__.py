"""The sections of the configuration, one file each, and their base class with strict scalar types.

In: plain values.
Out: frozen sections; a key is a field, its docstring the documentation.
Imported by: `attention`, `bench`, `certify`, `cli`, `config.facts`, `config.reading`, `config.recipe_facts`,
    `config.render`, `config.rules`, `config.run`, `config.shape`, `config.validate`, `convert`, `data`, `doctor`,
    `evaluate`, `export`, `halftune_webui`, `infer`, `launch`, `methods`, `model`, `optim`, `plan`, `precision`,
    `serve`, `train`, `verify`.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator


class Section(BaseModel):
    """A frozen section: unknown keys are errors; the string after a field is its documentation.

    A class that sets ``word`` may be written as a single value: with ``word = "compute"``, ``precision: bf16`` is short
    for ``precision: {compute: bf16}``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    word: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _expand_word(cls, value: Any) -> Any:
        return worded(value, cls)


def worded(value: Any, section: type[Section]) -> Any:
    """Return the section that a single value is short for; anything else unchanged."""
    return {section.word: value} if section.word and isinstance(value, str | bool | int | float) else value


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


def listed(value: Any) -> Any:
    """Return the list that a single item is short for; anything else unchanged."""
    return [value] if isinstance(value, str | dict) else value


def typed(value: Any) -> Any:
    """Return the section that its tag is short for; anything else unchanged."""
    return {"type": value} if isinstance(value, str) else value


Flag = Annotated[bool, Strict()]
"""A strict boolean: strings such as "no" and "false", and 0, are errors."""

Int = Annotated[int, Strict(), BeforeValidator(_no_bool)]
"""A strict integer."""

Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_no_bool)]
"""A finite float; accepts ``1e-4``, which YAML 1.1 reads as a string."""

LISTED = BeforeValidator(listed)
"""Marks a list that accepts a single item: ``train: data.json`` is short for ``train: [data.json]``."""

TYPED = BeforeValidator(typed)
"""Marks a tagged union that accepts its tag: ``adapter: none`` is short for ``adapter: {type: none}``."""


class PathMark(Enum):
    """Marks a text that may be a path, and says where the loader searches it; ``~`` is expanded in all of them."""

    INPUT = "the working directory, then the recipe's folder"
    OUTPUT = "the working directory"
    RECIPE = "the recipe's folder"


InputPath = Annotated[str, PathMark.INPUT]
OutputPath = Annotated[str, PathMark.OUTPUT]
RecipePath = Annotated[str, PathMark.RECIPE]
