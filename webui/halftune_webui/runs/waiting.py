"""Which runs wait: read by the queue, and by what only asks whether it has anything to do."""

from __future__ import annotations

from pathlib import Path

from halftune.core.files import read_json

OWN_FOLDER, QUEUE = ".webui", "queue.json"


def waiting(runs: Path) -> list[Path]:
    """Run folders in the queue, the next one first. Without a lock: the file is whole at every moment."""
    try:
        listed = read_json(runs / OWN_FOLDER / QUEUE, root=runs)
    except (OSError, ValueError):
        return []
    return [Path(one) for one in listed if isinstance(one, str)] if isinstance(listed, list) else []
