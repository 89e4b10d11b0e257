"""Where halftune keeps things outside a run folder."""

from __future__ import annotations

import os
from pathlib import Path

from halftune.core.errors import ConfigError


def cache_dir() -> Path:
    """The user's cache folder: ``$HALFTUNE_CACHE``, else ``$XDG_CACHE_HOME/halftune``, else ``~/.cache/halftune``.

    Raises:
        ConfigError: there is no home folder, and no variable names another one.
    """
    own = os.environ.get("HALFTUNE_CACHE")
    name = own or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "halftune")
    written_out = os.path.expanduser(name)
    if written_out.startswith("~"):
        what = f"there is no home folder for {name}"
        raise ConfigError(what, where="HALFTUNE_CACHE", remedy="set HALFTUNE_CACHE (or HOME) to a folder for caches")
    return Path(written_out)
