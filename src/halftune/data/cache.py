"""Disk cache of tokenised sources, keyed by everything that affects the tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from halftune import __version__
from halftune.core.atomic import whole_folder
from halftune.core.log import get_logger
from halftune.core.manifest import MANIFEST, damage, seal
from halftune.core.paths import cache_dir
from halftune.data.offset_tokenizer import backend_json
from halftune.data.store import TokenStore, load_store, save_store

log = get_logger(__name__)

PACKAGE = Path(__file__).parent  # any change in here may change tokens, labels or the report

Tokenised = tuple[TokenStore, dict[str, Any]]


def cache_key(tokenizer: PreTrainedTokenizerBase, parts: dict[str, Any]) -> str:
    """sha256 of the tokenizer, its chat template, this package's code and ``parts`` (JSON)."""
    everything = {
        "halftune": __version__,
        "code": code_of(PACKAGE),
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "tokenizer": hashlib.sha256(backend_json(tokenizer).encode()).hexdigest(),
        "template": tokenizer.chat_template,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        **parts,
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()


@cache
def code_of(folder: Path) -> str:
    """sha256 of the names and contents of all Python files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def cached(key: str, make: Callable[[], Tokenised]) -> Tokenised:
    """Return the cached result of ``make``.

    Concurrent processes wait for the one that builds it. A corrupt entry is rebuilt. If the cache cannot be written,
    a warning is logged and the result is not cached.
    """
    folder = cache_dir() / "data" / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_suffix(".lock"))
        lock.acquire()
    except OSError as error:
        log.warning("tokenised data is not kept: %s: %s", folder.parent, error.strerror)
        return make()
    try:
        found = _load(folder)
        if found is not None:
            return found
        made = make()
        _save(folder, made)
        return _load(folder) or made
    finally:
        lock.release()


def _load(folder: Path) -> Tokenised | None:
    if not folder.is_dir():
        return None
    if wrong := damage(folder, thorough=True, marker=MANIFEST):  # a flipped bit would be another token, without a word
        log.warning("corrupt token cache in %s (%s): rebuilding", folder, wrong)
        return None
    try:
        return load_store(folder), json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, EOFError) as error:
        log.warning("corrupt token cache in %s (%s): rebuilding", folder, error)
        return None


def _save(folder: Path, made: Tokenised) -> None:
    try:
        with whole_folder(folder) as beside:
            save_store(made[0], beside)
            (beside / "report.json").write_text(json.dumps(made[1]), encoding="utf-8")
            seal(beside, MANIFEST)
    except OSError as error:
        log.warning("tokenised data is not kept: %s: %s", folder.parent, error.strerror)
