"""Where the run folder is while a run goes on, also after somebody has moved it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.train.callbacks.base import Run

log = get_logger(__name__)
_OPEN = Path("/proc/self/fd")  # Linux tells where what is open has its name today


class Home:
    """Holds a run's folder open.

    Args:
        run: the run; :meth:`follow` keeps ``run.folder`` right.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.descriptor = os.open(run.folder, os.O_RDONLY)
        self.known = os.fstat(self.descriptor)

    def follow(self) -> bool:
        """Whether the folder is there. Where it was moved, ``run.folder`` becomes its new place, and it is said."""
        if self._is_at(self.run.folder):
            return True
        with suppress(OSError):
            place = (_OPEN / str(self.descriptor)).readlink()
            if self._is_at(place):
                log.warning("%s was moved to %s: the run goes on in there", self.run.folder, place)
                self.run.folder = place
                return True
        return False

    def insist(self) -> Path:
        """The folder, before something is saved: under an unmounted disk there is another one, or none.

        Raises:
            TrainingError: it has vanished.
        """
        if not self.follow():
            raise TrainingError(
                "the run folder has vanished: its disk was unmounted, or the folder was moved or deleted",
                where=str(self.run.folder),
                remedy="put it back and run the same command again: it goes on from the newest checkpoint in there",
            )
        return self.run.folder

    def close(self) -> None:
        """Lets go of the folder."""
        os.close(self.descriptor)

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), self.known)
        except OSError:
            return False
