"""Names of models and data: a path, or an id of the hub."""

from __future__ import annotations

import re

HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def looks_local(name: str) -> bool:
    """Whether a name looks like a path: by its beginning, several slashes, or a slash at the end."""
    return name.startswith((".", "/", "~", "\\")) or name.count("/") > 1 or name.endswith("/") or "\\" in name
