"""One process at a time in a run folder: a lock that the system releases when its process ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from halftune.core.atomic import NO_LOCKS
from halftune.core.errors import ConfigError, TrainingError
from halftune.core.files import open_file, read_json
from halftune.core.log import get_logger
from halftune.core.processes.process import identity

log = get_logger(__name__)
LOCK = ".lock"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Makes the folder and holds it for this process, so that no second run writes into it.

    The lock belongs to the open file, not to its content: after kill -9 it is free at once.

    Raises:
        ConfigError: another process holds it; says which one.
        TrainingError: it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = open_file(path / LOCK, "a+b", buffering=0)
    except OSError as error:
        raise TrainingError(
            f"cannot write the run folder: {error.strerror}",
            where=str(path),
            remedy="choose another training.output_dir",
            code="core.cannot_write",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _taken(path) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            log.warning("%s: this file system has no locks; start no second run in there", path)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        pid = os.getpid()
        owner = {"pid": pid, "process": identity(pid), "host": socket.gethostname(), "since": now}
        _write(path, file, json.dumps(owner) + "\n")
        try:
            yield
        finally:
            _write(path, file, "")


def check_unlocked(path: Path) -> None:
    """Makes sure that no other process trains in a folder, which need not exist; the lock is not kept.

    Raises:
        ConfigError: one does; says which.
    """
    try:
        file = open_file(path / LOCK)
    except OSError:
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look at once do not meet
        except BlockingIOError as error:
            raise _taken(path) from error
        except OSError:  # no locks here: said where the lock is taken
            return


def _taken(path: Path) -> ConfigError:
    what = f"another process is training in this folder{_owner(path)}"
    remedy = "wait for it, stop it, or choose another training.output_dir"
    return ConfigError(what, where=str(path), remedy=remedy, code="train.folder_locked")


def _write(path: Path, file: IO[bytes], text: str) -> None:
    try:
        file.truncate(0)
        file.write(text.encode())  # at the end, wherever that is: the file is open for appending
    except OSError as error:  # a full disk: the lock holds without its owner's name
        log.debug("cannot write %s: %s", path / LOCK, error.strerror)


def _owner(path: Path) -> str:
    try:
        owner = read_json(path / LOCK)
        return f": process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return ""
