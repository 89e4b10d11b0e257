"""Content fingerprints of base models and tokenizers; large files are sampled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halftune.config.facts.folder import VOCABULARIES, read_json
from halftune.config.facts.media import PROCESSOR_FILES
from halftune.config.facts.safetensors_headers import places, weight_files
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.model.files.locate import locate, locate_tokenizer

log = get_logger(__name__)

WHOLE = 64 << 20  # bytes up to which a file is hashed completely
NOTED = ("generation_config.json",)  # not read in training, but saved with a full model
BLOCK = 4096  # bytes sampled from each tensor of a larger file
_TOKENIZER = (*VOCABULARIES, "merges.txt", "added_tokens.json", "special_tokens_map.json")


def model_identity(model: ModelSection) -> dict[str, Any]:
    """The fingerprint ``{"commit", "files": {name: {"size", "digest", "mtime_ns"}}, "noted": {name: digest}}``.

    config.json, weight files up to 64 MiB and trusted Python files are hashed completely; of larger weight files, the
    header and 4 KiB in the middle of each tensor. ``commit`` is a hub model's commit, else None; sampled files have
    ``mtime_ns``. Quantisation on load counts as a file. ``noted`` are files that training does not read.

    Raises:
        ModelError: the model is missing, or a file is corrupt.
    """
    folder = locate(model)
    commit = folder.name if folder.parent.name == "snapshots" else None
    files = {path.name: _entry(path) for path in (folder / "config.json", *weight_files(folder))}
    if model.trust_remote_code:
        files |= {path.relative_to(folder).as_posix(): _entry(path) for path in sorted(folder.rglob("*.py"))}
    if model.quantization != "none":  # other weights of the same files
        files["model.quantization"] = {"size": 0, "digest": model.quantization}
    beside = {name: _sha256((folder / name).read_bytes()) for name in NOTED if (folder / name).is_file()}
    return {"commit": commit, "files": files, "noted": beside}


def tokenizer_identity(model: ModelSection) -> dict[str, str]:
    """sha256 of each tokenizer file; of tokenizer_config.json without the chat template.

    Includes trusted Python files of a separate tokenizer folder; the model's are in :func:`model_identity`.

    Raises:
        ModelError: the tokenizer is missing, or a file is corrupt.
    """
    folder = locate_tokenizer(model)
    paths = sorted({path for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()})
    if model.trust_remote_code and model.tokenizer is not None:
        paths += sorted(folder.rglob("*.py"))
    found = {path.relative_to(folder).as_posix(): _sha256(path.read_bytes()) for path in paths}
    if (config := folder / "tokenizer_config.json").is_file():
        settings = {key: value for key, value in read_json(config).items() if key != "chat_template"}
        found[config.name] = _sha256(json.dumps(settings, sort_keys=True).encode())
    return found


def processor_identity(model: ModelSection) -> dict[str, str]:
    """sha256 of each file of the image processor.

    Raises:
        ModelError: the model is missing.
    """
    paths = [locate(model) / name for name in PROCESSOR_FILES]
    return {path.name: _sha256(path.read_bytes()) for path in paths if path.is_file()}


def check_base(before: Any, model: ModelSection, *, allowed: bool) -> None:
    """Check that a base model is the one used in training.

    Args:
        before: its fingerprint in training; None if unknown, which logs a warning.
        model: the model to load now.
        allowed: whether differences are only a warning.

    Raises:
        ModelError: the model differs or is missing.
    """
    if not is_identity(before):
        log.warning("cannot verify the base model: the result has no record of it")
        return
    now = model_identity(model)
    if not (changed := "; ".join(model_differences(before, now))):
        for note in model_notes(before, now):
            log.warning("%s", note)
        return
    what = f"the base model changed since training: {changed}"
    if not allowed:
        moved = before["commit"] not in (None, now["commit"])
        back = f"set model.revision={before['commit']}" if moved else "restore it"
        remedy = f"{back}, or accept the change with training.allow_changes=[model]"
        raise ModelError(what, where=model.name_or_path, remedy=remedy, code="model.base_changed")
    log.warning("%s (accepted by training.allow_changes)", what)


def is_identity(value: Any) -> bool:
    """Whether an untrusted value has the format of :func:`model_identity`."""
    files = value.get("files") if isinstance(value, dict) and "commit" in value else None
    return (
        isinstance(files, dict)
        and all(isinstance(entry, dict) and isinstance(entry.get("digest"), str) for entry in files.values())
        and isinstance(value.get("noted", {}), dict)
    )


def model_differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Differences in the content of two base models."""
    changed = list(differing(digests(before), digests(now)))
    yield from changed
    if changed and before["commit"] != now["commit"]:
        yield f"commit {before['commit']} before, {now['commit']} now"


def model_notes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Differences that do not affect training between two base models."""
    for what in differing(before.get("noted", now["noted"]), now["noted"]):
        yield f"base model: {what} (not read in training)"
    if before["commit"] != now["commit"]:
        yield f"base model: commit changed from {before['commit']} to {now['commit']}; config and weights are identical"
        return
    again = [
        name
        for name, new in now["files"].items()
        if now["commit"] is None and before["files"].get(name, new).get("mtime_ns") != new.get("mtime_ns")
    ]
    if again:
        yield f"base model: rewritten with identical size and sampled bytes: {', '.join(again)}"


def digests(model: dict[str, Any]) -> dict[str, str]:
    """The digest of each file in a fingerprint."""
    return {name: entry["digest"] for name, entry in model["files"].items()}


def differing(before: dict[str, str], now: dict[str, str]) -> Iterator[str]:
    """Differences between two mappings of file names to digests."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield f"{name} {'is new' if name not in before else 'is missing' if name not in now else 'has changed'}"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _entry(path: Path) -> dict[str, Any]:
    status = path.stat()
    found: dict[str, Any] = {"size": status.st_size}
    if status.st_size <= WHOLE:
        return found | {"digest": _sha256(path.read_bytes())}
    return found | {"digest": _sampled(path), "mtime_ns": status.st_mtime_ns}


def _sampled(path: Path) -> str:
    tensors = places(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(min((start for start, _ in tensors), default=0)))  # the header
        for start, size in tensors:
            file.seek(start + max(0, (size - BLOCK) // 2))
            digest.update(file.read(min(size, BLOCK)))
    return digest.hexdigest()
