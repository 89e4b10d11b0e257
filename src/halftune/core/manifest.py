"""Manifests: the sizes and checksums of a folder's files, written last, which makes the folder valid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from halftune.core.files import MOST_JSON, read_json
from halftune.core.processes import heartbeat

MARKER = "checkpoint.json"
MANIFEST = "manifest.json"  # of all other folders
FORMAT = 1
_BLOCK = 16 << 20  # bytes per read
_READERS = 4  # files read in parallel: a fast disk outpaces one checksum


def entry(path: Path) -> dict[str, Any]:
    """Return a file's entry in a manifest."""
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def seal(
    folder: Path,
    marker: str = MARKER,
    known: Mapping[str, dict[str, Any]] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write the manifest of all files in ``folder``: ``{"format": 1, "files": {name: {"size", "sha256"}}}``.

    Args:
        folder: the complete folder.
        marker: the name of the manifest.
        known: entries by file name, from the code that wrote them; these files are not read again.
        facts: further JSON data in the manifest, under other keys.
    """
    known = known or {}
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: known.get(name) or entry(folder / name) for name in names if name != marker}
    manifest = {**(facts or {}), "format": FORMAT, "files": files}
    (folder / marker).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def manifest_facts(folder: Path) -> dict[str, Any]:
    """Return the further data in the manifest of a folder; empty without a manifest."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {key: value for key, value in found.items() if key not in ("format", "files")}


def damage(
    folder: Path,
    *,
    thorough: bool,
    marker: str = MARKER,
    expected: Collection[str] = (),
    share: tuple[int, int] = (0, 1),
    closed: bool = False,
) -> str:
    """Describe the corruption of a folder with a manifest, as a clause; empty if it is intact.

    Args:
        folder: a checkpoint or another folder with a manifest.
        thorough: compare checksums too, which reads every byte; else sizes only.
        marker: the name of the manifest.
        expected: files that the manifest must list.
        share: (rank, world size): each process verifies the checksums of other files.
        closed: also refuse symbolic links and unlisted files; hidden files and Markdown may change.
    """
    try:
        files = _files(folder / marker, notes=not closed)
        if closed and (wrong := _strange(folder, {*files, marker})):
            return wrong
        if missing := sorted(set(expected) - files.keys()):
            return f"{marker} does not list {missing[0]}"
        for name, (size, _) in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if (found := path.stat().st_size) != size:
                return f"{name} has {found:,} bytes instead of {size:,}"
        if changed := _changed(folder, files, share) if thorough else "":
            return f"{changed} has a wrong checksum"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read: {error.strerror}"
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"{marker} is not a manifest of format {FORMAT}"
    return ""


def _changed(folder: Path, files: Mapping[str, tuple[int, str]], share: tuple[int, int]) -> str:
    """The first file of a process's share whose checksum differs; empty if there is none."""
    names = sorted(files)[share[0] :: share[1]]
    with ThreadPoolExecutor(_READERS) as pool:
        digests = pool.map(lambda name: _sha256(folder / name), names)
        return next((name for name, digest in zip(names, digests, strict=True) if digest != files[name][1]), "")


def _strange(folder: Path, listed: Collection[str]) -> str:
    for path in folder.rglob("*"):  # not sorted: it may be a link to a very large folder
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            return f"{name} is a symbolic link"
        if not path.is_dir() and name not in listed and not _is_note(name):
            return f"{name} is not in {MANIFEST}"
    return ""


def _is_note(name: str) -> bool:
    return name.endswith(".md") or any(part.startswith(".") for part in name.split("/"))


def _files(marker: Path, *, notes: bool) -> dict[str, tuple[int, str]]:
    manifest: Any = read_json(marker, MOST_JSON)
    if manifest["format"] != FORMAT or not manifest["files"]:
        raise ValueError
    if any(name.startswith("/") or ".." in name.split("/") for name in manifest["files"]):
        raise ValueError  # outside of the folder
    listed = manifest["files"].items()
    return {name: (entry["size"], entry["sha256"]) for name, entry in listed if notes or not _is_note(name)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            heartbeat.beat()
    return digest.hexdigest()
