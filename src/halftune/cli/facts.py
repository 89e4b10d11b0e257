"""How many processes a run that is started here has."""

from __future__ import annotations

import os

from halftune.core.errors import PlanError


def world_size() -> int:
    """Processes of a run started here: ``WORLD_SIZE`` where a launcher has set it, else one.

    Raises:
        PlanError: the variable holds no count.
    """
    asked = os.environ.get("WORLD_SIZE") or "1"
    if not asked.isdecimal() or int(asked) < 1:
        what = f"{asked!r} is no number of processes"
        raise PlanError(what, where="WORLD_SIZE", remedy="start the run with torchrun, or unset the variable")
    return int(asked)
