"""A folder that is either whole or not there: written beside its place, then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside ``target`` that takes its place when the block ends well.

    A killed process leaves ``target`` as it was; what it had written (``<name>.partial``) goes with the next attempt.
    """
    partial, old = target.with_name(target.name + ".partial"), target.with_name(target.name + ".old")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)
