"""What every section of the configuration shares."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict


class Section(BaseModel):
    """A frozen section: unknown keys are errors, a field's documentation is the string beside it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


Flag = Annotated[bool, Strict()]
"""A boolean that must be written as one: "no", "false" and 0 are errors, never silently True or False."""

Int = Annotated[int, Strict(), BeforeValidator(_no_bool)]
"""A whole number, written as one."""

Number = Annotated[float, BeforeValidator(_no_bool)]
"""A float; ``1e-4``, which YAML 1.1 reads as a string, is accepted."""
