"""Rules, their violations, and the context they may read besides the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import NamedTuple

from halftune.config.reading.names import looks_local
from halftune.config.run import RunConfig
from halftune.config.tree import KeyPath


class Violation(NamedTuple):
    """An invalid value at ``key``; ``code`` defaults to the rule's."""

    key: KeyPath
    what: str
    remedy: str
    code: str = ""


@dataclass(frozen=True)
class Context:
    """What rules may read besides the configuration.

    Attributes:
        recipe: the YAML file.
        outputs: run folders of dependencies, whose models may not exist yet.
        look_at_files: whether data files and folders must exist now.
    """

    recipe: FilePath
    outputs: tuple[str, ...] = ()
    look_at_files: bool = True

    def made_by_dependency(self, name: str) -> bool:
        """Whether this path is an output of a dependency."""
        path = os.path.abspath(name)
        return any(path == output or path.startswith(output + os.sep) for output in self.outputs)

    def is_hub_id(self, name: str) -> bool:
        """Whether a model name must be a hub id."""
        if name.startswith("builtin:") or os.path.exists(name) or self.made_by_dependency(name):
            return False
        return not looks_local(name)


Check = Callable[[RunConfig, Context], Iterator[Violation]]


class Rule(NamedTuple):
    """A rule.

    Attributes:
        check: yields violations.
        code: default error code.
        reads: keys; the rule is skipped if one of them is invalid.
    """

    check: Check
    code: str
    reads: tuple[KeyPath, ...]


RULES: list[Rule] = []
"""Every rule of the imported modules."""


def rule(code: str, *keys: str) -> Callable[[Check], Check]:
    """Register a function as a rule with this code, which reads these keys."""

    def enter(check: Check) -> Check:
        RULES.append(Rule(check, code, tuple(tuple(key.split(".")) for key in keys)))
        return check

    return enter
