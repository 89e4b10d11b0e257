"""The package's one logger. Only the main process speaks below WARNING."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from halftune.core.files import open_file
from halftune.core.launcher import ALONE, Process

# What these warn of follows from files and recipe, so that all processes of a machine would say the same.
_ALIKE = ("data", "model", "train.setup", "train.parallel.reading")
FILE_ONLY = {"file_only": True}  # log.info(…, extra=FILE_ONLY): the console has it otherwise, or does not want it


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, a child of ``halftune``."""
    return logging.getLogger(name)


def configure(process: Process = ALONE) -> None:
    """Sets the console handler up once; ranks above 0 log warnings only, and of those that they share one a machine."""
    root = logging.getLogger("halftune")
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname).1s %(message)s"))
    handler.addFilter(lambda record: "file_only" not in vars(record))
    root.addHandler(handler)
    root.setLevel(logging.INFO if process.main else logging.WARNING)
    root.propagate = False
    if process.local_rank > 0:
        for name in _ALIKE:
            root.getChild(name).setLevel(logging.ERROR)


@contextmanager
def held_back() -> Iterator[None]:
    """Inside ``with``, the console is left to what is being written there; what is logged follows at the end."""
    waiting: list[tuple[logging.Handler, logging.LogRecord]] = []
    consoles = [each for each in logging.getLogger("halftune").handlers if not isinstance(each, logging.FileHandler)]

    def holding(handler: logging.Handler) -> Callable[[logging.LogRecord], bool]:
        return lambda record: waiting.append((handler, record)) is not None

    filters = [(handler, holding(handler)) for handler in consoles]
    for handler, hold in filters:
        handler.addFilter(hold)
    try:
        yield
    finally:
        for handler, hold in filters:
            handler.removeFilter(hold)
        for handler, record in waiting:
            handler.handle(record)


@contextmanager
def log_to(path: Path, *, enabled: bool = True) -> Iterator[None]:
    """Inside ``with``, everything that is logged is also appended to a file, with its time."""
    if not enabled:
        yield
        return
    handler = _RunLog(path, encoding="utf-8", delay=True)  # opened where its failing is dealt with
    with suppress(OSError), open_file(path, "ab"):
        pass
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    root = logging.getLogger("halftune")
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        with suppress(OSError):  # what a full disk did not take
            handler.close()


class _RunLog(logging.FileHandler):
    """A log file whose disk may be full or gone: said once, on the console."""

    _said = False

    def _open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(open_file(Path(self.baseFilename), "ab"), encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.stream is not None and not os.fstat(self.stream.fileno()).st_nlink:
                self.close()  # deleted: what is said from now on goes into a new one
            super().emit(record)
        except OSError:  # the file cannot be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            get_logger(__name__).warning("cannot write %s: %s", self.baseFilename, error.strerror)
