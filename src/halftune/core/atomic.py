"""Files and folders that are whole or not there: written beside their place, forced to the disk, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from halftune.core import alive

WRITING, OLD = ".writing", ".old"


def write_text(path: Path, text: str) -> None:
    """Writes a file in UTF-8, or leaves what was there.

    Raises:
        OSError: it cannot be written; nothing half-written is left.
    """
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields the path of a file to write, which takes the place of ``path`` when the block ends well.

    Raises:
        OSError: it cannot be synced or renamed; ``path`` is as it was and nothing half-written is left.
    """
    beside = _beside(path, WRITING)
    try:
        beside.unlink(missing_ok=True)  # what was left there may be a link
        yield beside
        sync(beside)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):  # a disk that has gone cannot be tidied; what went wrong first is what matters
            beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder that takes the place of ``target`` when the block ends well.

    At every moment there is a whole ``target``, or a whole older one that :func:`clear_leftovers` puts back.

    Raises:
        OSError: it cannot be written; ``target`` is as it was and nothing half-written is left.
    """
    beside, old = _beside(target, WRITING), _beside(target, OLD)
    try:
        _clear(beside)
        beside.mkdir(parents=True)
        yield beside
        mode = beside.stat().st_mode & 0o666  # as the umask says; safetensors writes files that only their owner reads
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


def remove_folder(path: Path) -> None:
    """Removes a folder; at every moment it is whole or gone.

    Raises:
        OSError: it cannot be removed.
    """
    beside = _beside(path, WRITING)
    shutil.rmtree(beside, ignore_errors=True)
    path.rename(beside)
    shutil.rmtree(beside)


def clear_leftovers(folder: Path) -> None:
    """Tidies up after a process that was killed: half-written things go, an older one without successor comes back."""
    for old in folder.glob(f".*{OLD}"):
        target = folder / old.name.removeprefix(".").removesuffix(OLD)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)
    for beside in folder.glob(f".*{WRITING}"):
        _clear(beside)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        alive.sign(os.fstat(descriptor).st_size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: Exception) -> bool:
    """Whether a disk or a quota is full, by an OSError or by what a library makes of one."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    return (isinstance(error, OSError) and error.errno in numbers) or any(os.strerror(n) in str(error) for n in numbers)


def first_aid(error: Exception) -> str:
    """What to do about a file that cannot be written, as the beginning of a sentence.

    Args:
        error: an OSError, or what a library (safetensors, tokenizers) makes of one, with the system's words in it.
    """
    number, said = (error.errno if isinstance(error, OSError) else None), str(error)

    def means(*numbers: int) -> bool:
        return number in numbers or any(os.strerror(one) in said for one in numbers)

    if is_full(error):
        return "free space"
    if means(errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the folder writable"
    return "see that the disk is there and whole"


def _clear(path: Path) -> None:
    """Removes a folder or a file; of a link the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")
