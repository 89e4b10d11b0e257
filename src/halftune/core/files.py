"""Reads and opens files that somebody else may have written: no link is followed, no pipe waited for, size limited."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

MOST_JSON = 100_000_000  # bytes; the limit of the safetensors library for its JSON headers
_FLAGS = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "wb": os.O_WRONLY | os.O_CREAT,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND,
}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_file(path: Path, mode: str = "rb", *, root: Path | None = None, buffering: int = -1) -> IO[bytes]:
    """Opens a file that is no link, in a folder that no link below ``root`` leads to.

    Args:
        path: the file.
        mode: ``rb``, ``r+b``, ``wb``, ``ab`` or ``a+b``.
        root: a folder that holds the file, at any depth; it may be reached by a link. Default: the file's folder.
        buffering: as of ``open``; 0 writes at once.

    Raises:
        OSError: the file or a folder between it and ``root`` is a symbolic link, the path leaves ``root``, the file is
            no regular file, or it cannot be opened.
    """
    root = root or path.parent
    *between, name = path.relative_to(root).parts
    if ".." in (*between, name):
        raise OSError(errno.EINVAL, "leaves its folder", str(path))
    directory = -1
    try:
        directory = os.open(root, _FOLDER)
        for part in between:
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = inner
        flags = _FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.fdopen(os.open(name, flags, 0o666, dir_fd=directory), mode, buffering)
    except OSError as error:
        linked = any(each.is_symlink() for each in (path, *path.parents[: len(between)]))
        raise OSError(error.errno, "is a symbolic link" if linked else error.strerror, str(path)) from error
    finally:
        if directory >= 0:
            os.close(directory)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    if mode == "wb":
        file.truncate()
    return file


def read_text(path: Path, *, root: Path | None = None) -> str:
    """A file of UTF-8 text, opened by :func:`open_file`; bytes that are none are replaced.

    Raises:
        OSError: as :func:`open_file`.
    """
    with open_file(path, root=root) as file:
        return file.read().decode("utf-8", errors="replace")


def read_limited(path: Path, most: int = MOST_JSON) -> bytes:
    """A file whose size is limited. Links are followed: a hub cache is made of them.

    Raises:
        OSError: it has more than ``most`` bytes, or cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
    return data
