"""What tells one base model or tokenizer from another, without reading every byte of a long file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from halftune.config.facts.folder import VOCABULARIES, read_json
from halftune.config.facts.safetensors_headers import places, weight_files
from halftune.config.sections.model import ModelSection
from halftune.model.locate import locate, locate_tokenizer

WHOLE = 64 << 20  # bytes up to which a file is hashed whole
BLOCK = 4096  # bytes in the middle of each tensor of a longer file
_TOKENIZER = (*VOCABULARIES, "merges.txt", "added_tokens.json", "special_tokens_map.json")


def model_identity(model: ModelSection) -> dict[str, Any]:
    """A base model's ``{"commit": …, "files": {name: {"size", "digest", "mtime_ns"}}}``, JSON-able.

    Of config.json, of weight files up to 64 MiB and of Python that the config trusts, every byte is hashed. Of a longer
    weight file, its header and 4 KiB in the middle of each tensor are. ``commit`` is that of a hub model, else None;
    ``mtime_ns`` is there where a file was sampled.

    Raises:
        ModelError: the model is not there, or a file is damaged.
    """
    folder = locate(model)
    commit = folder.name if folder.parent.name == "snapshots" else None
    files = {path.name: _entry(path) for path in (folder / "config.json", *weight_files(folder))}
    if model.trust_remote_code:
        files |= {path.relative_to(folder).as_posix(): _entry(path) for path in sorted(folder.rglob("*.py"))}
    return {"commit": commit, "files": files}


def tokenizer_identity(model: ModelSection) -> dict[str, str]:
    """File → sha256 of each file of the tokenizer; of tokenizer_config.json without the chat template.

    Of a tokenizer in a folder of its own, also of Python that is trusted; the model's is in :func:`model_identity`.

    Raises:
        ModelError: the tokenizer is not there, or a file is damaged.
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
