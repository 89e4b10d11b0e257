"""Data files for the page: what lies under the web UI's folders, and what a browser uploads into ``data/``."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from halftune.config.rules.files import DATA_ENDINGS, is_hidden
from halftune.core.errors import ConfigError, HalftuneError
from halftune_webui import archive
from halftune_webui.hints import hints
from halftune_webui.paths import inside, is_below
from halftune_webui.settings import Settings

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

PREFIX = "/halftune/"
UPLOADS = f"{PREFIX}upload/"
LARGE = {UPLOADS: 8 * 2**30}  # bytes of a request under that path
FOLDER = "data"  # below the working directory
MOST = 500  # names of a folder that are listed


def listing(settings: Settings, folder: str) -> dict[str, Any]:
    """What a folder holds for training.

    Args:
        settings: limits of the web UI.
        folder: a path of the browser; empty for the working directory.

    Returns:
        ``folder`` (as a recipe names it), ``up`` (the folder above, None where that is not allowed), ``roots``,
        ``folders`` and ``files`` (each with ``name``, ``path``, ``bytes``), ``more`` (whether there are more).

    Raises:
        ConfigError: it lies outside the roots, or cannot be read.
    """
    place = inside(settings.roots, folder or str(settings.roots[0]))
    try:
        folders, found = _entries(settings, place)
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise ConfigError(what, where=folder, remedy="choose another folder", code="core.unreadable") from None
    return {
        "folder": named(settings, place),
        "up": named(settings, place.parent) if is_below(settings.roots, place.parent) else None,
        "roots": [named(settings, root) for root in settings.roots],
        "folders": folders[:MOST],
        "files": found[:MOST],
        "more": max(len(folders), len(found)) > MOST,
    }


def named(settings: Settings, path: Path) -> str:
    """A path as a recipe names it: relative to the working directory where it lies below it."""
    home = settings.roots[0]
    return os.path.relpath(path, home) if path.is_relative_to(home) else str(path)


def _entries(settings: Settings, place: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Folders and data files that may be shown."""
    folders, found = [], []
    with os.scandir(place) as entries:
        for entry in itertools.islice(sorted(entries, key=lambda one: one.name), 20 * MOST):
            path = Path(entry.path)
            if is_hidden(entry.name) or not is_below(settings.roots, path):
                continue
            if entry.is_dir():
                folders.append({"name": entry.name, "path": named(settings, path)})
            elif is_data(entry.name) and entry.is_file():
                size = entry.stat().st_size
                found.append({"name": entry.name, "path": named(settings, path), "bytes": size})
    return folders, found


def is_data(name: str) -> bool:
    """Whether a file of that name can hold training data."""
    return name.lower().removesuffix(".gz").endswith(DATA_ENDINGS)


def upload_target(settings: Settings, name: str) -> Path:
    """Where an uploaded file goes: ``data/NAME`` in the working directory, numbered where that is taken.

    An archive becomes a folder of its name without the ending.

    Raises:
        ConfigError: it is no name of a data file or an archive.
    """
    known = is_data(name) or name.lower().endswith(archive.ENDING)
    if "/" in name or "\0" in name or name.startswith(".") or len(os.fsencode(name)) > 200 or not known:
        endings = ", ".join((*DATA_ENDINGS, archive.ENDING))
        what = "is not the name of a data file"
        raise ConfigError(what, where=name[:80], remedy=f"known endings: {endings}", code="data.unknown_file_type")
    folder = inside(settings.roots, str(settings.roots[0] / FOLDER))
    name = name if is_data(name) else name[: -len(archive.ENDING)]
    stem, dot, ending = name.partition(".")
    tries = itertools.chain([name], (f"{stem}-{number}{dot}{ending}" for number in itertools.count(2)))
    return next(folder / one for one in tries if not os.path.lexists(folder / one))


async def _received(settings: Settings, name: str, request: Request) -> tuple[Path, int]:
    """Where the rows of an uploaded file are, and how many files of an archive were left out."""
    from starlette.concurrency import run_in_threadpool

    async def write(file: IO[bytes]) -> None:
        async for part in request.stream():
            await run_in_threadpool(file.write, part)

    target = upload_target(settings, name)
    target.parent.mkdir(exist_ok=True)
    if not is_data(name):
        with tempfile.TemporaryFile(dir=target.parent) as file:
            await write(file)
            left = threading.Event()
            work = asyncio.create_task(run_in_threadpool(archive.unpack, file, target, is_data, left))
            while not (await asyncio.wait({work}, timeout=1.0))[0]:
                if await request.is_disconnected():
                    left.set()
            return work.result()
    with target.open("xb") as file:
        try:
            await write(file)
        except BaseException:
            target.unlink()
            raise
    return target, 0


def add_routes(outer: Starlette, settings: Settings) -> None:
    """Serves the listing, the uploads and the suggestions of the form. Who may ask is decided before."""
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse

    def listed(request: Request) -> Response:
        return JSONResponse(listing(settings, request.query_params.get("folder", "")))

    async def uploaded(request: Request) -> Response:
        name = str(request.path_params["name"])
        try:
            path, left_out = await _received(settings, name, request)
        except OSError as error:
            return JSONResponse({"error": f"{name}: {error.strerror}"}, 507)
        except ClientDisconnect:
            return JSONResponse({"error": f"{name}: the upload was interrupted"}, 400)
        return JSONResponse({"path": named(settings, path), "left_out": left_out})

    def suggested(request: Request) -> Response:
        return JSONResponse(hints(settings))

    def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HalftuneError)
        return JSONResponse({"error": str(error), "code": error.code}, 400)

    outer.add_exception_handler(HalftuneError, refused)
    outer.add_route(f"{PREFIX}files", listed)
    outer.add_route(f"{PREFIX}hints", suggested)
    outer.add_route(UPLOADS + "{name}", uploaded, methods=["PUT"])
