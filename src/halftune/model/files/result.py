"""The result of a finished run, ``final/``: its manifest, ``finished.json`` and base model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from halftune.core.atomic import write_text
from halftune.core.errors import ModelError
from halftune.core.files import MOST_JSON, read_json
from halftune.core.log import get_logger
from halftune.core.manifest import MANIFEST, damage, entry

log = get_logger(__name__)

FINAL, FINISHED = "final", "finished.json"
BASE = "base"  # in the manifest: the identity of the base model


def finished_at(run: Path) -> int | None:
    """The last step of a finished run; None if the run is not finished."""
    found = _finished(run)
    return None if found is None else found[0]


def write_finished(run: Path, step: int) -> None:
    """Mark a run as finished, with the checksum of its result.

    Raises:
        OSError: the file cannot be written.
    """
    facts = {"step": step, "time": time.time(), "result": entry(run / FINAL / MANIFEST)["sha256"]}
    write_text(run / FINISHED, json.dumps(facts))


def damage_of_result(run: Path) -> str:
    """Describe the corruption of a finished run's result; empty if it is intact. Reads every byte."""
    final, found = run / FINAL, _finished(run)
    if found is None or (found[1] is None and final.is_dir()):
        return ""
    if not final.is_dir():
        return f"{FINAL} is missing"
    if wrong := damage(final, thorough=True, marker=MANIFEST, closed=True):
        return f"{FINAL}: {wrong}"
    return "" if entry(final / MANIFEST)["sha256"] == found[1] else f"{FINAL}: {MANIFEST} was replaced"


def check_result(run: Path) -> None:
    """Check that the result of a run is what training wrote. Reads every byte.

    Raises:
        ModelError: a file differs; names it.
    """
    final, found = run / FINAL, _finished(run)
    sealed = (final / MANIFEST).exists()
    if found is not None and found[1] is not None:
        wrong = damage_of_result(run).removeprefix(f"{FINAL}: ")
    else:  # of an earlier version, or of a run that is being extended
        wrong = damage(final, thorough=True, marker=MANIFEST, closed=True) if sealed else ""
    if wrong:
        remedy = f"restore the file, or train again: train --config {run / 'config.yaml'}"
        what = f"the result was modified after training: {wrong}"
        raise ModelError(what, where=str(final), remedy=remedy, code="model.result_damaged")
    if not sealed:
        log.warning("cannot verify %s: no %s", final, MANIFEST)


def check_written(folder: Path, *, thorough: bool) -> None:
    """Check that a model written by halftune is unchanged; folders without our manifest are not checked.

    Args:
        folder: a run's ``final``, a copy of it, or an export.
        thorough: verify checksums, which reads every byte; else compare file sizes.

    Raises:
        ModelError: a file differs; names it.
    """
    folder = folder.resolve()
    if thorough and folder.name == FINAL and finished_at(folder.parent) is not None:
        check_result(folder.parent)
    elif has_manifest(folder) and (wrong := damage(folder, thorough=thorough, marker=MANIFEST)):
        remedy = f"copy it again, or delete its {MANIFEST} to accept the files as they are"
        what = f"the model was modified after halftune wrote it: {wrong}"
        raise ModelError(what, where=str(folder), remedy=remedy, code="model.result_damaged")


def has_manifest(folder: Path) -> bool:
    """Whether there is a manifest of halftune, or an unreadable one; other tools use this file name too."""
    try:
        found = read_json(folder / MANIFEST, MOST_JSON)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return isinstance(found, dict) and {"format", "files"} <= found.keys()


def base_of_result(final: Path) -> Any:
    """The fingerprint of a result's base model (``model.files.identity``); None if it is not recorded."""
    try:
        return read_json(final / MANIFEST, MOST_JSON).get(BASE)
    except (OSError, ValueError, AttributeError):
        return None


def _finished(run: Path) -> tuple[int, str | None] | None:
    """The last step of a finished run, and the sha256 of its manifest (None for older versions)."""
    try:
        facts = read_json(run / FINISHED)
        return int(facts["step"]), facts.get("result")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        log.warning("cannot read %s: assuming the run is not finished", run / FINISHED)
        return None
