"""Data sets as ZIP files: rows with their images, sounds and videos, unpacked into a folder of their own."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from halftune.config.rules.files import is_hidden
from halftune.core.errors import ConfigError, DataError, HalftuneError
from halftune.data.readers.rows import AGAIN, most_of
from halftune.data.sources.source import TEXTS

ENDING = ".zip"
MEDIA_ENDINGS = (
    *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a"),
    *(".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi"),
)
_MOST = 32 * 2**30  # bytes of all files of an archive
_FILES = 50_000  # that are unpacked; each takes about a millisecond, also an empty one
_INDEX = 2**25  # bytes of an archive's list of files, which zipfile holds in memory: 300,000 names


class _Archive(io.BufferedReader):
    def read(self, size: int | None = -1, /) -> bytes:
        if size and size > _INDEX:
            raise zipfile.BadZipFile("too many files")
        return super().read(size)


def unpack(
    packed: io.BufferedRandom, folder: Path, is_data: Callable[[str], bool], left: threading.Event
) -> tuple[Path, int]:
    """Write the data and media files of an archive into a new folder, which appears when all are written.

    Args:
        packed: the archive.
        folder: does not exist yet.
        is_data: whether a file of that name can hold rows.
        left: set when nobody waits for it any more: then it ends, and leaves nothing.

    Returns:
        The file of rows, or the folder of several; how many hidden files, links and files of other kinds were left out.

    Raises:
        ConfigError: a name leads out of the folder.
        DataError: damaged or encrypted, far larger than the archive, of too many files, or without rows.
        HalftuneError: nobody waits for it.
        OSError: it cannot be written.
    """
    name = folder.name + ENDING
    packed.flush()
    with (
        _errors(name),
        zipfile.ZipFile(_Archive(packed.raw)) as archive,
        tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as place,
    ):
        files = [one for one in archive.infolist() if not one.is_dir()]
        taken = [one for one in files if _is_wanted(one, is_data)]
        most = min(most_of(os.fstat(packed.fileno()).st_size), _MOST)
        if sum(one.file_size for one in taken) > most:  # zipfile reads no more of a file than this size
            what, remedy = f"unpacks to more than {most:,} bytes", "unpack it yourself, and choose the files"
            raise DataError(what, where=name, remedy=remedy, code="data.compressed_too_well")
        if len(taken) > _FILES:
            what, remedy = f"has {len(taken):,} files; the maximum is {_FILES:,}", "unpack it yourself on the server"
            raise DataError(what, where=name, remedy=remedy, code="data.compressed_too_well")
        rows = _rows([PurePosixPath(one.filename) for one in taken if is_data(one.filename)], name)
        for one in taken:
            if left.is_set():
                raise HalftuneError("the browser left before it was unpacked", where=name, code="webui.stopped")
            target = Path(place, "new", one.filename)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(one) as source, target.open("xb") as file:
                shutil.copyfileobj(source, file)
        Path(place, "new").rename(folder)
    return folder / rows, len(files) - len(taken)


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Inside, what zipfile and its decoders raise of a damaged archive is a ``DataError``."""
    try:
        yield
    except Exception as error:
        if isinstance(error, HalftuneError) or (isinstance(error, OSError) and error.errno):
            raise
        what = f"damaged or encrypted ZIP file: {error}"
        raise DataError(what, where=name, remedy=AGAIN, code="core.file_damaged") from error


def _is_wanted(one: zipfile.ZipInfo, is_data: Callable[[str], bool]) -> bool:
    """Whether it is a data or a media file, and nothing that a system writes beside them."""
    path = PurePosixPath(one.filename)
    if path.is_absolute() or ".." in path.parts:
        remedy = "pack the folder of the data set itself"
        raise ConfigError("leads out of the archive", where=one.filename, code="webui.path_outside", remedy=remedy)
    hidden = any(map(is_hidden, path.parts))
    known = is_data(path.name) or path.name.lower().endswith(MEDIA_ENDINGS)
    return known and not hidden and not stat.S_ISLNK(one.external_attr >> 16)


def _rows(found: list[PurePosixPath], name: str) -> PurePosixPath:
    """The only file of rows, or the folder that holds all of them; texts beside others tell of them."""
    found = [path for path in found if path.suffix.lower() not in TEXTS] or found
    if not found:
        remedy = "put the file of the rows into it, beside the folders of the media"
        raise DataError("contains no data files", where=name, remedy=remedy, code="data.no_data_files")
    return found[0] if len(found) == 1 else PurePosixPath(os.path.commonpath([path.parent for path in found]))
