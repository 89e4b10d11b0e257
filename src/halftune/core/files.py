"""Opens untrusted files safely (no symbolic links, no pipes, limited size), and finds the cache folder."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from halftune.core.errors import ConfigError


def cache_dir() -> Path:
    """Return the cache folder: ``$HALFTUNE_CACHE``, else ``$XDG_CACHE_HOME/halftune``, else ``~/.cache/halftune``.

    Raises:
        ConfigError: there is no home folder, and no variable is set.
    """
    own = os.environ.get("HALFTUNE_CACHE")
    name = own or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "halftune")
    written_out = os.path.expanduser(name)
    if written_out.startswith("~"):
        what = f"cannot expand {name}: no home folder"
        raise ConfigError(
            what,
            where="HALFTUNE_CACHE",
            remedy="set HALFTUNE_CACHE (or HOME) to a writable folder",
            code="core.cache_not_writable",
        )
    return Path(written_out)


MOST_JSON = 100_000_000  # bytes; the limit of the safetensors library for its JSON headers
SMALL_JSON = 4 << 20  # bytes of a JSON state file
_FLAGS = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "wb": os.O_WRONLY | os.O_CREAT,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND,
}
_HANDED_OVER = re.compile(r"/dev/stdin|/(dev|proc/self)/fd/\d+")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_file(path: Path, mode: str = "rb", *, root: Path | None = None, buffering: int = -1) -> IO[bytes]:
    """Open a regular file without following symbolic links below ``root``.

    Args:
        path: the file.
        mode: ``rb``, ``r+b``, ``wb``, ``ab`` or ``a+b``.
        root: a parent folder of the file; may be a link itself. Default: the file's folder.
        buffering: as in ``open``; 0 is unbuffered.

    Raises:
        OSError: the file or a folder between it and ``root`` is a symbolic link, the path leaves ``root``, the file is
            not a regular file, or it cannot be opened.
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
        # non-blocking: opening a pipe would wait for its other end, before it is refused below
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
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    if mode == "wb":
        file.truncate()
    return file


def open_input(path: Path) -> IO[bytes]:
    """Open a file that a user names for reading: a regular file, or a stream that was handed to this process, such as
    ``/dev/stdin``. Links are followed. A pipe or device would wait for a writer, or never end.

    Raises:
        OSError: it is neither, or cannot be opened.
    """
    if _HANDED_OVER.fullmatch(str(path)):
        return path.open("rb")
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    kind = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(kind):
        file.close()
        number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(number, "is a folder" if stat.S_ISDIR(kind) else "is not a regular file", str(path))
    return file


def read_text(path: Path, *, root: Path | None = None) -> str:
    """Read a UTF-8 text file opened by :func:`open_file`; invalid bytes are replaced.

    Raises:
        OSError: it has more than ``MOST_JSON`` bytes; as :func:`open_file`.
    """
    return read_limited(path, root=root or path.parent).decode("utf-8", errors="replace")


def read_limited(path: Path, most: int = MOST_JSON, *, root: Path | None = None) -> bytes:
    """Read a file of limited size.

    Args:
        path: the file.
        most: limit in bytes.
        root: as in :func:`open_file`. Default: links are followed, since a hub cache consists of links.

    Raises:
        OSError: it has more than ``most`` bytes, or cannot be read; with ``root``, as :func:`open_file`.
    """
    with open_input(path) if root is None else open_file(path, root=root) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
    return data


def json_objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects in lines; a line that is none, such as one that a killed process left unfinished, is skipped."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(entry := json.loads(line), dict):
                yield entry


def read_json(path: Path, most: int = SMALL_JSON, *, root: Path | None = None) -> Any:
    """Read an untrusted JSON file of limited size.

    Args:
        path: the file.
        most: maximum size in bytes.
        root: as in :func:`open_file`.

    Raises:
        OSError: it is missing, not a regular file, a link, or unreadable.
        ValueError: it is larger than ``most`` bytes, or not JSON.
    """
    with open_file(path, root=root) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path.name} has {size:,} bytes, expected at most {most:,}")
        data = file.read(most + 1)
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
