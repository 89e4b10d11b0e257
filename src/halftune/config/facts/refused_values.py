"""Checks config.json for values that transformers refuses, and against the tokenizer's ids, without importing it.

Ids are read from parts of the tokenizer's files: most of a tokenizer.json is merges.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from json import JSONDecoder
from pathlib import Path
from typing import Any

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.facts.folder import read_json
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.core.files import read_limited
from halftune.core.table import did_you_mean

_BUILTIN = "builtin:"
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_DTYPE = re.compile(r"(torch\.)?(auto|bfloat16|half|double|bool|float(16|32|64|8_\w+)?|complex\d+|u?int\d+)")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
# Keys of config.json and generation_config.json → their least and greatest number; others may be anything but NaN.
_RANGES = (
    (re.compile(r"(\w+_)?max_position_embeddings|n_positions|max_seq(uence)?_len(gth)?"), -1, 2**40),
    (re.compile(r"\w+_token_index"), -(2**10), 2**31 - 1),  # LLaVA's image token is -200
    (re.compile(r"\w+_token_ids?"), -1, 2**31 - 1),
    (re.compile(r"\w*(dropout|_pdrop)"), 0, 1),
    (re.compile(r"\w*norm_eps(ilon)?"), 0, 1),
    (re.compile(r"rope_theta|rotary_emb_base|rope_local_base_freq|(\w+_)?factor|beta_fast|beta_slow"), 0, 1e15),
)
_GENERATION = ("eos_token_id", "bos_token_id", "pad_token_id")  # of generation_config.json, which ends answers
_PARTS = ("text_config", "vision_config", "audio_config")


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
        if known is None:
            return None
        size = known.get("text_config", known)["vocab_size"]
        return TokenIds(size, size)
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


def check_values(raw: dict[str, Any], *, where: str, own_code: bool) -> None:
    """Refuse unknown dtypes, layer types, activations and RoPE types.

    Args:
        raw: the parsed config.json.
        where: the file, for the error.
        own_code: whether remote code reads the file, which may support other values.

    Raises:
        ModelError: names the key, the value and what is accepted.
    """
    parts = [("", raw), *((f"{name}.", raw[name]) for name in _PARTS if isinstance(raw.get(name), dict))]
    for place, part in parts:
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            if value is not None and not isinstance(value, dict) and not _DTYPE.fullmatch(str(value)):
                remedy = did_you_mean(str(value), _DTYPES)
                what = f"{place}{key}: unknown dtype {value!r}"
                raise ModelError(what, where=where, remedy=remedy, code="model.config_invalid")
        if not own_code:
            _check_layers(part, place, where)
            _check_activation(part, place, where)
            _check_rope(part, place, where)
    _check_numbers(raw, where)


def check_generation(folder: Path) -> None:
    """Check the token ids and the numbers of a folder's generation_config.json, if there is one.

    Raises:
        ModelError: it cannot be read; names the key and the value.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    raw = read_json(path)
    for key in _GENERATION:
        value = raw.get(key)
        ids = value if isinstance(value, list) else [value]
        if wrong := [one for one in ids if one is not None and (isinstance(one, bool) or not isinstance(one, int))]:
            raise _invalid(f"{key}: expected a token id, or a list of them, got {wrong[0]!r}", str(path))
    _check_numbers(raw, str(path))


def _check_numbers(raw: dict[str, Any], where: str) -> None:
    """Refuse NaN, and numbers out of their key's range, in all sections and lists."""
    left: list[tuple[str, Any]] = list(raw.items())
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{key}.{name}", inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(key, inner) for inner in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            bounds = next((one[1:] for one in _RANGES if one[0].fullmatch(key.rpartition(".")[2])), None)
            if value != value or (bounds and not bounds[0] <= value <= bounds[1]):
                expected = f"a number from {bounds[0]} to {bounds[1]}" if bounds else "a number"
                raise _invalid(f"{key}: expected {expected}, got {value!r}", where)


def _invalid(what: str, where: str) -> ModelError:
    return ModelError(what, where=where, remedy="correct the file, or download it again", code="model.config_invalid")


def _check_layers(part: dict[str, Any], place: str, where: str) -> None:
    kinds, count = part.get("layer_types"), part.get("num_hidden_layers")
    known = _layer_types()
    if not isinstance(kinds, list) or not isinstance(count, int) or not known or _checks_itself(part):
        return
    if unknown := [kind for kind in kinds if kind not in known]:
        what = f"{place}layer_types: unknown type {unknown[0]!r}"
        raise ModelError(what, where=where, remedy=did_you_mean(str(unknown[0]), known), code="model.config_invalid")
    if len(kinds) != count:
        what = f"{place}layer_types has {len(kinds)} entries for num_hidden_layers = {count}"
        raise ModelError(what, where=where, remedy="fix config.json, or download it again", code="model.config_invalid")


def _check_activation(part: dict[str, Any], place: str, where: str) -> None:
    """Check the activation if the family's code uses transformers' table; other families have their own names."""
    code, known = _family_source(part, "modeling"), _activations()
    for key in _ACTIVATIONS:
        name = part.get(key)
        if isinstance(name, str) and known and name not in known and f"ACT2FN[config.{key}]" in code:
            what = f"{place}{key}: unknown activation {name!r}"
            raise ModelError(what, where=where, remedy=did_you_mean(name, known), code="model.config_invalid")


def _check_rope(part: dict[str, Any], place: str, where: str) -> None:
    """Check the RoPE type if the family's code uses transformers' table; types named in the code itself pass."""
    code, known = _family_source(part, "modeling"), _rope_types()
    if not known or "ROPE_INIT_FUNCTIONS[" not in code:
        return
    code += _family_source(part, "configuration")
    for key in ("rope_parameters", "rope_scaling"):
        said = part.get(key)
        for rope in (said, *said.values()) if isinstance(said, dict) else ():  # one, or one for each kind of layer
            kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
            if isinstance(kind, str) and kind not in known and f'"{kind}"' not in code:
                what = f"{place}{key}: unknown rope_type {kind!r}"
                raise ModelError(what, where=where, remedy=did_you_mean(kind, known), code="model.config_invalid")


@cache
def _rope_types() -> frozenset[str]:
    """transformers' RoPE types; empty if its source cannot be read."""
    table = re.search(r"^ROPE_INIT_FUNCTIONS\b.*?\{\n(.*?)^\}", _source("modeling_rope_utils.py"), re.M | re.S)
    return frozenset({"default", *re.findall(r'^\s+"(\w+)":', table[1], re.M)}) if table else frozenset()


@cache
def _activations() -> frozenset[str]:
    """transformers' activations; empty if its source cannot be read."""
    table = re.search(r"^ACT2CLS = \{\n(.*?)^\}", _source("activations.py"), re.M | re.S)
    return frozenset(re.findall(r'^\s+"(\w+)":', table[1], re.M)) if table else frozenset()


@cache
def _layer_types() -> frozenset[str]:
    """transformers' layer types, including old names; empty if its source cannot be read."""
    source = _source("configuration_utils.py")
    lists = re.findall(
        r"^(?:ALLOWED_\w*LAYER_TYPES\w* = \(|_LEGACY_LAYER_TYPE_REMAP = \{)\n(.*?)^[)}]", source, re.M | re.S
    )
    return frozenset(name for text in lists for name in re.findall(r'^\s+"(\w+)"', text, re.M))


def _checks_itself(part: dict[str, Any]) -> bool:
    """Whether the family's configuration class validates layer types itself."""
    return "def validate_layer_type" in _family_source(part, "configuration")


def _family_source(part: dict[str, Any], kind: str) -> str:
    """The family's ``configuration`` or ``modeling`` file in transformers; empty if there is none."""
    name = str(part.get("model_type")).replace("-", "_").removesuffix("_text")
    return _source(f"models/{name}/{kind}_{name}.py") if name.isidentifier() else ""


@cache
def _source(path: str) -> str:
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return ""
    file = Path(next(iter(spec.submodule_search_locations))) / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""
