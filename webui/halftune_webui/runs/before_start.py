"""What would stop a recipe after its start: a run folder that is taken, and data that cannot be trained on."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from halftune.config.load import LoadedConfig
from halftune.config.run import RunConfig
from halftune.core.errors import HalftuneError
from halftune.data.preflight import validate_data
from halftune.data.sources.source import files_of
from halftune_webui.recipes.recipe import Examined
from halftune_webui.runs.start_stop import check_place
from halftune_webui.settings import Settings

# What a look at the data depends on, and the keys without which a configuration is none.
_READ: dict[str, Any] = {"model": {"name_or_path"}, "method": True, "data": True, "training": {"seed", "output_dir"}}


def obstacles(examined: Examined, settings: Settings) -> tuple[HalftuneError, ...]:
    """The problems that only the disk knows; empty where the recipe itself has some."""
    if examined.problems or examined.loaded is None:
        return ()
    found = [_of_place(examined.loaded, settings), _of_data(examined.loaded.run)]
    return tuple(problem for problem in found if problem is not None)


def _of_place(loaded: LoadedConfig, settings: Settings) -> HalftuneError | None:
    try:
        check_place(settings, loaded)
    except HalftuneError as error:
        return error
    return None


def _of_data(run: RunConfig) -> HalftuneError | None:
    """Files are read again where one of them, or a key that says how it is read, has changed."""
    marks = []
    try:
        for section in (*run.data.train, *run.data.eval):
            if os.path.exists(section.path):
                found = [path.stat() for path in files_of(Path(section.path)) if path.is_file()]
                marks.append(tuple((one.st_mtime_ns, one.st_size) for one in found))
    except HalftuneError as error:
        return error
    return _looked_over(run.model_dump_json(include=_READ), tuple(marks))


@lru_cache(maxsize=64)
def _looked_over(config: str, marks: tuple[object, ...]) -> HalftuneError | None:
    try:
        validate_data(RunConfig.model_validate_json(config))
    except HalftuneError as error:
        return error
    return None
