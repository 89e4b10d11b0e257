"""Where the run folder is while a run goes on, also after somebody has moved or deleted it."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path

from halftune.core.atomic import write_text
from halftune.core.errors import HalftuneError, TrainingError
from halftune.core.log import get_logger
from halftune.train.callbacks.base import Run
from halftune.train.folder import RESOLVED
from halftune.train.lock import locked

log = get_logger(__name__)
_OPEN = Path("/proc/self/fd")  # Linux tells where what is open has its name today
_DELETED = " (deleted)"  # and says so behind the name that it had
# What a run writes once, at its start: without it the folder is none of a run.
ONCE = (RESOLVED, "config.yaml", "plan.json", "data_report.json", "environment.json")


class Home:
    """Holds a run's folder open.

    Args:
        run: the run; :meth:`follow` keeps ``run.folder`` right.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.descriptor = os.open(run.folder, os.O_RDONLY)
        self.known = os.fstat(self.descriptor)
        self.kept: dict[str, bytes] = {}
        self.lost = self.said = False  # the folder is not there; it was deleted; both are said once
        self.again = ExitStack()

    def remember(self) -> None:
        """Keeps the files that are written once, in case that somebody deletes them."""
        for name in ONCE:
            with suppress(OSError):
                self.kept[name] = (self.run.folder / name).read_bytes()

    def follow(self) -> bool:
        """Whether the folder is there. Where it was moved, ``run.folder`` becomes its new place, and it is said.

        A folder that was deleted is made again, with what says which run it is: what comes now is not lost.
        """
        found = self._is_at(self.run.folder)
        if found and not (self.run.folder / RESOLVED).exists():
            self._put_back()
        found = found or self._moved() or self._made_again()
        if not found and not self.lost:
            log.warning("%s has vanished: put it back before the next save, which needs it", self.run.folder)
        self.lost = not found
        return found

    def _moved(self) -> bool:
        with suppress(OSError):
            place = (_OPEN / str(self.descriptor)).readlink()
            if self._is_at(place):
                log.warning("%s was moved to %s: the run goes on in there", self.run.folder, place)
                self.run.folder = place
                return True
        return False

    def _made_again(self) -> bool:
        """Not under an unmounted disk, which is not deleted, and not where another run has begun."""
        try:
            if not str((_OPEN / str(self.descriptor)).readlink()).endswith(_DELETED):
                return False
            self.run.folder.mkdir(parents=True)
            descriptor = os.open(self.run.folder, os.O_RDONLY)
        except OSError:
            return False
        os.close(self.descriptor)
        self.descriptor, self.known = descriptor, os.fstat(descriptor)
        self._put_back()
        return True

    def _put_back(self) -> None:
        folder = self.run.folder
        if not self.said:  # a disk may not let us
            self.said = True
            log.warning("%s was deleted under the run: made again; checkpoints and metrics so far are gone", folder)
        with suppress(HalftuneError):  # somebody was faster: the next save will say so
            self.again.enter_context(locked(folder))
        for name, content in self.kept.items():
            with suppress(OSError):
                write_text(folder / name, content.decode())

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
        self.again.close()
        os.close(self.descriptor)

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), self.known)
        except OSError:
            return False
