"""The highest token ids of a tokenizer, from parts of its files, since most of a tokenizer.json is merges."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from json import JSONDecoder
from pathlib import Path
from typing import Any

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.sections.model import ModelSection
from halftune.core.files import read_limited

_BUILTIN = "builtin:"


@dataclass(frozen=True)
class TokenIds:
    """The numbers of ids of a tokenizer.

    Attributes:
        ordinary: highest id of the vocabulary plus one.
        all: highest id including added tokens plus one.
    """

    ordinary: int
    all: int


def token_ids(model: ModelSection, folder: Path | None) -> TokenIds | None:
    """Return the ids of a run's tokenizer; None if its files are missing or have another format.

    Args:
        model: the model's config, which may set a tokenizer.
        folder: the model's folder, if local.
    """
    name = model.tokenizer or model.name_or_path
    if name.startswith(_BUILTIN):
        known = BUILTIN_MODELS.get(name.removeprefix(_BUILTIN))
        return TokenIds(known["vocab_size"], known["vocab_size"]) if known is not None else None
    place = folder if model.tokenizer is None else Path(model.tokenizer)
    if place is None:
        return None
    for file, read in ((place / "tokenizer.json", _of_tokenizer), (place / "vocab.json", _of_vocabulary)):
        if file.is_file():
            return _kept(file, file.stat().st_mtime_ns, read)
    return None


@functools.lru_cache(maxsize=8)
def _kept(file: Path, _changed: int, read: Any) -> TokenIds | None:
    """``read`` a file, cached until it changes; None for a corrupt file, which loading reports."""
    try:
        return read(read_limited(file).decode(), file.parent)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _of_tokenizer(text: str, folder: Path) -> TokenIds | None:
    added = (entry["id"] for entry in _part(text, "added_tokens") or ())
    vocabulary = _part(text, "vocab")
    if vocabulary is None:
        return None
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return _counted(ids, (*added, *_beside(folder)))


def _of_vocabulary(text: str, folder: Path) -> TokenIds:
    return _counted(json.loads(text).values(), _beside(folder))


def _beside(folder: Path) -> list[int]:
    """Ids of added tokens in separate files."""
    found: list[int] = []
    if (folder / "added_tokens.json").is_file():
        found += json.loads(read_limited(folder / "added_tokens.json").decode()).values()
    if (folder / "tokenizer_config.json").is_file():
        settings = json.loads(read_limited(folder / "tokenizer_config.json").decode())
        found += map(int, settings.get("added_tokens_decoder") or ())
    return found


def _counted(ids: Iterable[int], added: Iterable[int]) -> TokenIds:
    ordinary = max(ids, default=-1) + 1
    return TokenIds(ordinary, max(ordinary, max(added, default=-1) + 1))


def _part(text: str, key: str) -> Any:
    """The value of the first key of this name; quotes within strings are escaped."""
    found = re.search(rf'(?<!\\)"{key}"\s*:\s*(?=[\[{{])', text)
    return None if found is None else JSONDecoder().raw_decode(text, found.end())[0]
