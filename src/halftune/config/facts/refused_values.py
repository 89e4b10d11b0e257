"""Values of config.json that transformers refuses when it reads it, told before it is imported."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from halftune.core.errors import ModelError
from halftune.core.table import did_you_mean

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_DTYPE = re.compile(r"(torch\.)?(auto|bfloat16|half|double|bool|float(16|32|64|8_\w+)?|complex\d+|u?int\d+)")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_PARTS = ("text_config", "vision_config", "audio_config")


def check_values(raw: dict[str, Any], *, where: str, own_code: bool) -> None:
    """Refuses a dtype that torch does not have, and layers or activations that transformers does not have.

    Args:
        raw: the parsed config.json.
        where: the file, for the error.
        own_code: whether Python that comes with the checkpoint reads the file, which may take other layers.

    Raises:
        ModelError: names the key, the value and what is accepted.
    """
    parts = [("", raw), *((f"{name}.", raw[name]) for name in _PARTS if isinstance(raw.get(name), dict))]
    for place, part in parts:
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            if value is not None and not isinstance(value, dict) and not _DTYPE.fullmatch(str(value)):
                remedy = did_you_mean(str(value), _DTYPES)
                raise ModelError(f"{place}{key} is {value!r}, which is no dtype of torch", where=where, remedy=remedy)
        if not own_code:
            _check_layers(part, place, where)
            _check_activation(part, place, where)


def _check_layers(part: dict[str, Any], place: str, where: str) -> None:
    kinds, count = part.get("layer_types"), part.get("num_hidden_layers")
    known = _layer_types()
    if not isinstance(kinds, list) or not isinstance(count, int) or not known or _checks_itself(part):
        return
    if unknown := [kind for kind in kinds if kind not in known]:
        what = f"{place}layer_types has {unknown[0]!r}, which transformers does not know"
        raise ModelError(what, where=where, remedy=did_you_mean(str(unknown[0]), known))
    if len(kinds) != count:
        what = f"{place}layer_types has {len(kinds)} entries for num_hidden_layers = {count}"
        raise ModelError(what, where=where, remedy="correct config.json, or fetch it again")


def _check_activation(part: dict[str, Any], place: str, where: str) -> None:
    """Only where the family's code looks the name up in transformers' table: others have names of their own."""
    code, known = _family_source(part, "modeling"), _activations()
    for key in _ACTIVATIONS:
        name = part.get(key)
        if isinstance(name, str) and known and name not in known and f"ACT2FN[config.{key}]" in code:
            what = f"{place}{key} is {name!r}, which is no activation of transformers"
            raise ModelError(what, where=where, remedy=did_you_mean(name, known))


@cache
def _activations() -> frozenset[str]:
    """The activations of transformers; empty where its source cannot be read."""
    table = re.search(r"^ACT2CLS = \{\n(.*?)^\}", _source("activations.py"), re.M | re.S)
    return frozenset(re.findall(r'^\s+"(\w+)":', table[1], re.M)) if table else frozenset()


@cache
def _layer_types() -> frozenset[str]:
    """What transformers takes, of old names too; empty where its source cannot be read."""
    source = _source("configuration_utils.py")
    lists = re.findall(
        r"^(?:ALLOWED_\w*LAYER_TYPES\w* = \(|_LEGACY_LAYER_TYPE_REMAP = \{)\n(.*?)^[)}]", source, re.M | re.S
    )
    return frozenset(name for text in lists for name in re.findall(r'^\s+"(\w+)"', text, re.M))


def _checks_itself(part: dict[str, Any]) -> bool:
    """Whether the family's own configuration class says which layers it takes."""
    return "def validate_layer_type" in _family_source(part, "configuration")


def _family_source(part: dict[str, Any], kind: str) -> str:
    """The family's ``configuration`` or ``modeling`` file in transformers; "" where there is none."""
    name = str(part.get("model_type")).replace("-", "_").removesuffix("_text")
    return _source(f"models/{name}/{kind}_{name}.py") if name.isidentifier() else ""


@cache
def _source(path: str) -> str:
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return ""
    file = Path(next(iter(spec.submodule_search_locations))) / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""
