"""Folders in the user's cache: computed once, sealed by a manifest, read by all processes and all starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from halftune.core.atomic import whole_folder
from halftune.core.files import cache_dir
from halftune.core.log import get_logger
from halftune.core.manifest import MANIFEST, damage, seal

log = get_logger(__name__)
T = TypeVar("T")


def entry(kind: str, key: str) -> Path:
    """The folder of an entry, which need not exist. ``key``: sha256 of everything that the content depends on.

    Raises:
        ConfigError: the user has no cache folder.
    """
    return cache_dir() / kind / key


def read(folder: Path, load: Callable[[Path], T | None], what: str) -> T | None:
    """``load(folder)``; None where there is no entry, or a corrupt one, which is logged as ``what``.

    Checksums are compared: a flipped bit would be another token or another number, without a word.
    """
    try:
        if not folder.is_dir():
            return None
        wrong = damage(folder, thorough=True, marker=MANIFEST)
        if not wrong:
            return load(folder)
    except (OSError, ValueError, EOFError, LookupError, MemoryError) as error:
        wrong = str(error)
    log.warning("corrupt %s in %s (%s): rebuilding", what, folder, wrong)
    return None


def write(folder: Path, save: Callable[[Path], object], what: str) -> bool:
    """Write an entry by ``save(temporary folder)``; a cache that cannot be written is a warning.

    Returns:
        whether it was written.
    """
    try:
        with whole_folder(folder) as beside:
            save(beside)
            seal(beside, MANIFEST)
    except OSError as error:
        log.warning("%s not kept: %s: %s", what, folder.parent, error.strerror)
        return False
    return True


def stored(folder: Path, save: Callable[[Path], object], load: Callable[[Path], T | None], what: str) -> T | None:
    """The entry, written first where there is none; processes that ask at the same time wait for the one that writes.

    Returns:
        None if the cache cannot be written; a warning says so.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_suffix(".lock"))
        lock.acquire()
    except OSError as error:
        log.warning("%s not kept: %s: %s", what, folder.parent, error.strerror)
        return None
    try:
        found = read(folder, load, what)
        return read(folder, load, what) if found is None and write(folder, save, what) else found
    finally:
        lock.release()
