"""What makes a folder valid: a list of its files with their sizes and checksums, written last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from halftune.core import alive

MARKER = "checkpoint.json"
MANIFEST = "manifest.json"  # of every other folder that is sealed
FORMAT = 1
_BLOCK = 16 << 20  # bytes that are read at a time
_READERS = 4  # files that are read at once: a fast disk gives more than one checksum takes


def entry(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def seal(folder: Path, marker: str = MARKER, known: Mapping[str, dict[str, Any]] | None = None) -> None:
    """Writes the manifest of all files in ``folder`` and below: ``{"format": 1, "files": {name: {"size", "sha256"}}}``.

    Args:
        folder: with all its files.
        marker: the name of the manifest.
        known: entries of files by their names, of whoever wrote them; these are not read again.
    """
    known = known or {}
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: known.get(name) or entry(folder / name) for name in names if name != marker}
    (folder / marker).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1), encoding="utf-8")


def damage(
    folder: Path,
    *,
    thorough: bool,
    marker: str = MARKER,
    expected: Collection[str] = (),
    share: tuple[int, int] = (0, 1),
) -> str:
    """What is wrong with a sealed folder, as a clause; empty where nothing is.

    Args:
        folder: a checkpoint, or another folder that was sealed.
        thorough: compare checksums too, which reads every byte; else sizes only.
        marker: the name of the manifest.
        expected: files that such a folder has, and that the manifest must list.
        share: this process and how many there are: each compares the checksums of other files.
    """
    try:
        files = _files(folder / marker)
        if missing := sorted(set(expected) - files.keys()):
            return f"{marker} does not list {missing[0]}"
        for name, (size, _) in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if (found := path.stat().st_size) != size:
                return f"{name} has {found:,} bytes instead of {size:,}"
        names = sorted(files)[share[0] :: share[1]] if thorough else []
        with ThreadPoolExecutor(_READERS) as pool:
            for name, digest in zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True):
                if digest != files[name][1]:
                    return f"{name} is not what was written (checksum)"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read: {error.strerror}"
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"{marker} is no manifest of format {FORMAT}"
    return ""


def _files(marker: Path) -> dict[str, tuple[int, str]]:
    manifest: Any = json.loads(marker.read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT or not manifest["files"]:
        raise ValueError
    return {name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            alive.sign()
    return digest.hexdigest()
