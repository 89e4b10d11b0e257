"""A config.json that transformers refuses is named for what is wrong in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import checkpoint, section

from halftune.config.facts.families import other_class
from halftune.config.facts.model import read_model_facts
from halftune.core.errors import ModelError
from halftune.model.files.architectures import read_config
from halftune.model.rwkv7.configuration import RWKV7Config
from halftune.model.tokenizer.tokenizer import load_tokenizer


def changed(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def test_kinds_of_layers_that_do_not_exist(tmp_path: Path) -> None:
    folder = changed(checkpoint(tmp_path / "base"), layer_types=["linear_attention", "banana"])
    says = r"config.json: The `layer_types` entries must be .*'banana'"
    with pytest.raises(ModelError, match=says):
        read_config(folder, trust_remote_code=False)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=says):
        load_tokenizer(section(folder))


@pytest.mark.parametrize("values", [{"norm_eps": "x"}, {"head_dim": "32"}, {"norm_first": "no"}])
def test_rwkv7_values_of_another_type(values: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=f"Field '{next(iter(values))}'"):
        RWKV7Config(**values)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "refused"),
    [
        ({"rope_parameters": {**YARN, "rope_type": "yarm"}}, "yarm"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrop", "factor": 2.0}}, "longrop"),
        ({"rope_parameters": {"full_attention": {**YARN, "rope_type": "yarm"}}}, "yarm"),
        ({"rope_parameters": YARN}, ""),
    ],
)
def test_a_kind_of_rope_that_does_not_exist(tmp_path: Path, rope: dict[str, Any], refused: str) -> None:
    folder = changed(checkpoint(tmp_path / "base"), **rope)
    if not refused:
        read_model_facts(section(folder))
        return
    with pytest.raises(ModelError, match=f"rope_type '{refused}'"):
        read_model_facts(section(folder))


@pytest.mark.parametrize(
    "name", ["Qwen2ForSequenceClassification", "Qwen2ForTokenClassification", "Qwen2ForProcessRewardModel"]
)
def test_a_classifier_is_no_language_model(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=name):
        read_model_facts(section(changed(checkpoint(tmp_path / "base"), architectures=[name])))


@pytest.mark.parametrize(
    ("names", "other"),
    [
        (["Qwen2ForCausalLM"], None),
        (["QWEN2ForCausalLM"], None),
        (None, None),
        (["Qwen2ForCasualLM"], ("Qwen2ForCasualLM", "Qwen2ForCausalLM")),
        (["Qwen2Model"], ("Qwen2Model", "Qwen2ForCausalLM")),
    ],
)
def test_another_class_than_the_one_that_is_loaded_is_named(names: Any, other: tuple[str, str] | None) -> None:
    assert other_class({"model_type": "qwen2", "architectures": names}, "") == other
