"""Locations of files outside run folders."""

from __future__ import annotations

import os
from pathlib import Path

from halftune.core.errors import ConfigError


def cache_dir() -> Path:
    """Return the cache folder: ``$HALFTUNE_CACHE``, else ``$XDG_CACHE_HOME/halftune``, else ``~/.cache/halftune``.

    Raises:
        ConfigError: there is no home folder, and no variable is set.
    """
    own = os.environ.get("HALFTUNE_CACHE")
    name = own or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "halftune")
    written_out = os.path.expanduser(name)
    if written_out.startswith("~"):
        what = f"cannot expand {name}: no home folder"
        raise ConfigError(
            what,
            where="HALFTUNE_CACHE",
            remedy="set HALFTUNE_CACHE (or HOME) to a writable folder",
            code="core.cache_not_writable",
        )
    return Path(written_out)
