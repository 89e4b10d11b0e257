"""Keeps tokenised sources on disk, keyed by everything that they depend on."""

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
from halftune.data.exact import backend_json
from halftune.data.store import TokenStore, load_store, save_store

log = get_logger(__name__)

ROOM = Path(__file__).parent  # whatever in here changes may give other tokens, labels or report entries

Made = tuple[TokenStore, dict[str, Any]]


def cache_key(tokenizer: PreTrainedTokenizerBase, parts: dict[str, Any]) -> str:
    """sha256 over the tokenizer with its template, the code that renders and tokenises, and ``parts`` (JSON)."""
    everything = {
        "halftune": __version__,
        "code": code_of(ROOM),
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
    """sha256 over the Python sources in a folder and below, their names included."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def cached(key: str, make: Callable[[], Made]) -> Made:
    """What ``make`` gives, from disk where it is there already.

    Only one of several processes that ask at once makes it; the others wait. A damaged entry is made anew. Where the
    cache cannot be written, a warning says so and nothing is kept.
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


def _load(folder: Path) -> Made | None:
    if not folder.is_dir():
        return None
    if wrong := damage(folder, thorough=True, marker=MANIFEST):  # a flipped bit would be another token, without a word
        log.warning("the cached tokens in %s are damaged (%s) and made anew", folder, wrong)
        return None
    try:
        return load_store(folder), json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, EOFError) as error:
        log.warning("the cached tokens in %s are damaged (%s) and made anew", folder, error)
        return None


def _save(folder: Path, made: Made) -> None:
    try:
        with whole_folder(folder) as beside:
            save_store(made[0], beside)
            (beside / "report.json").write_text(json.dumps(made[1]), encoding="utf-8")
            seal(beside, MANIFEST)
    except OSError as error:
        log.warning("tokenised data is not kept: %s: %s", folder.parent, error.strerror)
