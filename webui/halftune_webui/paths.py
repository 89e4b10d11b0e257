"""Paths that come from the browser: resolved, and refused outside the web UI's folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from halftune.core.errors import ConfigError


class OutsideError(ConfigError):
    """A path leaves the folders that the web UI may use."""


def inside(roots: Sequence[Path], text: str) -> Path:
    """The path that ``text`` means, with ``~``, ``..`` and symbolic links resolved. It need not exist.

    Args:
        roots: allowed folders, already resolved.
        text: a path; a relative one starts in the working directory.

    Raises:
        OutsideError: it lies outside every root, or is no path at all. Nothing is said about what is there.
    """
    remedy = f"stay under {' or '.join(map(str, roots))}, or start the web UI with --root FOLDER"
    if not text.strip() or "\0" in text:
        raise OutsideError("is no path", where=repr(text), code="webui.path_outside", remedy=remedy)
    try:
        path = Path(os.path.realpath(os.path.expanduser(text)))
    except (OSError, ValueError):
        raise OutsideError("is no path", where=text, code="webui.path_outside", remedy=remedy) from None
    if not is_below(roots, path):
        what = "is outside the folders that this web UI may use"
        raise OutsideError(what, where=text, code="webui.path_outside", remedy=remedy)
    return path


def is_below(roots: Sequence[Path], path: str | Path) -> bool:
    """Whether a path, its links resolved, lies under a root."""
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(root) for root in roots)


def check_links(roots: Sequence[Path], folder: Path) -> None:
    """Makes sure that no link in a folder leads out of the roots: what reads the folder follows it.

    Raises:
        OutsideError: one does.
    """
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(place, name)
            if os.path.islink(path) and not is_below(roots, path):
                what = f"is or holds a link that leads out of this web UI's folders: {os.path.relpath(path, folder)}"
                raise OutsideError(
                    what,
                    where=str(folder),
                    code="webui.path_outside",
                    remedy="remove it, or start the web UI with --root FOLDER",
                )
