"""Atomic writes of files and folders: written under a temporary name, synced, then renamed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from halftune.core.processes import heartbeat

WRITING, OLD, SCRATCH = ".writing", ".old", ".scratch"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems that know none


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically.

    Raises:
        OSError: it cannot be written; the previous file is unchanged.
    """
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces ``path`` if the block succeeds.

    Raises:
        OSError: it cannot be synced or renamed; ``path`` is unchanged and the temporary file is removed.
    """
    beside = _beside(path, WRITING)
    try:
        beside.unlink(missing_ok=True)  # a leftover may be a link
        yield beside
        sync(beside)
        # after the sync: a new name may reach the disk before the data does
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):  # keep the first error if the disk is gone
            beside.unlink(missing_ok=True)
        raise
    sync(path.parent)  # the name: a sync of the file does not include it (fsync(2))


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield an empty temporary folder that replaces ``target`` if the block succeeds.

    At any time there is a complete ``target``, or a complete older one that :func:`clear_leftovers` restores.

    Raises:
        OSError: it cannot be written; ``target`` is unchanged and the temporary folder is removed.
    """
    beside, old = _beside(target, WRITING), _beside(target, OLD)
    try:
        _clear(beside)
        beside.mkdir(parents=True)
        yield beside
        mode = beside.stat().st_mode & 0o666  # from the umask: safetensors writes files that only their owner can read
        for path in (*beside.rglob("*"), beside):
            if path.is_file() and not path.is_symlink():
                path.chmod(mode)
            sync(path)
        if target.exists():
            _clear(old)
            target.rename(old)
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        with suppress(OSError):
            if old.exists() and not target.exists():
                old.rename(target)
        raise
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target`` for intermediate files, and remove it afterwards.

    It has one name for each target and is locked: what a killed process left is removed, what a live one uses is not.

    Raises:
        BlockingIOError: another process uses it.
        OSError: it cannot be made.
    """
    beside = _beside(target, SCRATCH)
    beside.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(beside, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        for path in beside.iterdir():
            _clear(path)
        try:
            yield beside
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    finally:
        os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Remove a folder atomically.

    Raises:
        OSError: it cannot be removed.
    """
    beside = _beside(path, WRITING)
    shutil.rmtree(beside, ignore_errors=True)
    path.rename(beside)
    shutil.rmtree(beside)


def clear_leftovers(folder: Path) -> None:
    """Clean up after a killed process: remove temporary files and folders, restore an older one without successor."""
    for old in folder.glob(f".*{OLD}"):
        target = folder / old.name.removeprefix(".").removesuffix(OLD)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)
    for beside in folder.glob(f".*{WRITING}"):
        _clear(beside)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        heartbeat.beat(os.fstat(descriptor).st_size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: Exception) -> bool:
    """Whether an error (an OSError, or a library's with its message) means a full disk or quota."""
    return _means(error, errno.ENOSPC, errno.EDQUOT)


def write_error_remedy(error: Exception) -> str:
    """Return the remedy for a file that cannot be written, as the beginning of a sentence.

    Args:
        error: an OSError, or a library's error (safetensors, tokenizers) that contains its message.
    """
    if is_full(error):
        return "free space"
    if _means(error, errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the folder writable"
    return "check the disk"


def _means(error: Exception, *numbers: int) -> bool:
    number = error.errno if isinstance(error, OSError) else None
    return number in numbers or any(os.strerror(one) in str(error) for one in numbers)


def _clear(path: Path) -> None:
    """Remove a folder or a file; of a link, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")
