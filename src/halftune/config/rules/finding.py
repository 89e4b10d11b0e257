"""What a rule finds, and what rules may know besides the configuration itself."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import NamedTuple

from halftune.config.shape import Path

HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


class Finding(NamedTuple):
    """Something wrong with the value at ``key``."""

    key: Path
    what: str
    remedy: str


@dataclass(frozen=True)
class Context:
    """What the rules may look at.

    Attributes:
        recipe: the YAML file.
        outputs: run folders of the recipes that this one depends on; a model in there may not exist yet.
        look_at_files: whether data files and folders must exist now.
    """

    recipe: FilePath
    outputs: tuple[str, ...] = ()
    look_at_files: bool = True

    def made_by_dependency(self, name: str) -> bool:
        """Whether a recipe that this one depends on will make this path."""
        path = os.path.abspath(name)
        return any(path == output or path.startswith(output + os.sep) for output in self.outputs)

    def is_hub_id(self, name: str) -> bool:
        """Whether a model name can only be one of the hub."""
        if name.startswith("builtin:") or os.path.exists(name) or self.made_by_dependency(name):
            return False
        return not looks_local(name)


def looks_local(name: str) -> bool:
    """Whether a name is written like a path: it starts like one, or has more than one slash, or ends with one."""
    return name.startswith((".", "/", "~", "\\")) or name.count("/") > 1 or name.endswith("/") or "\\" in name
