"""The package's logger. Only rank 0 logs below WARNING."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from halftune.core.files import open_file
from halftune.core.processes.process import ALONE, Process

# Warnings of these modules depend on files and config only: all processes of a node would repeat them.
_ALIKE = ("core.disk_cache", "data", "model", "plan", "train.setup")
FILE_ONLY = {"file_only": True}  # log.info(…, extra=FILE_ONLY): not on the console


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, a child of ``halftune``."""
    return logging.getLogger(name)


def configure(process: Process = ALONE) -> None:
    """Set up the console handler once; ranks above 0 log warnings only, and shared warnings once per node."""
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
    """Inside, log records for the console are held back until the end."""
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
    """Inside, log records are also appended to a file, with timestamps."""
    if not enabled:
        yield
        return
    handler = _RunLog(path, encoding="utf-8", delay=True)  # opened in emit, which handles errors
    with suppress(OSError), open_file(path, "ab"):
        pass
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    root = logging.getLogger("halftune")
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        with suppress(OSError):  # a full disk
            handler.close()


class _RunLog(logging.FileHandler):
    """A log file that reports write errors once, on the console."""

    _said = False

    def _open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(open_file(Path(self.baseFilename), "ab"), encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.stream is not None and not os.fstat(self.stream.fileno()).st_nlink:
                self.close()  # deleted: create it again
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
