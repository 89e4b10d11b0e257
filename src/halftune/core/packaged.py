"""Reads YAML files that halftune brings along or wrote, in a tenth of the time where PyYAML has its C library."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

MOST_DEPTH = 100  # of lists and mappings in each other; thousands overflow the C library's stack


def read_yaml(package: str, name: str) -> Any:
    """Return the values of the YAML file ``name`` of a package, such as ``halftune.core``."""
    return _load(files(package).joinpath(name).read_text(encoding="utf-8"))


def read_written(text: str) -> Any:
    """Return the values of a YAML file that halftune wrote, and others may have changed.

    Raises:
        ValueError: it has an alias, of which few make a giant tree, or is nested deeper than `MOST_DEPTH`.
        YAMLError: it is no YAML.
        LookupError, TypeError, AttributeError: it has a tag whose value is of another kind.
    """
    return _load(text, trusted=False)


def _load(text: str, *, trusted: bool = True) -> Any:
    import yaml  # here: `--help` needs none

    try:
        from yaml import CSafeLoader as SafeLoader
    except ImportError:
        from yaml import SafeLoader
    depth = 0
    for event in () if trusted else yaml.parse(text, SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias (*name)")
    return yaml.load(text, SafeLoader)
