"""Where halftune keeps things outside a run folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache folder: ``$HALFTUNE_CACHE``, else ``$XDG_CACHE_HOME/halftune``, else ``~/.cache/halftune``."""
    if own := os.environ.get("HALFTUNE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "halftune"
