"""Whatever is damaged in a checkpoint or a tokenizer: it loads, or a sentence says what is wrong with which file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fuzz_harness import Damage, answered, budget, fingerprint
from fuzz_strategies import damages, json_damages
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import checkpoint

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.sections.model import ModelSection
from halftune.data.pipeline import prepare
from halftune.hardware.catalogue import lookup
from halftune.model.files.builtin import materialize
from halftune.model.files.preflight import check_folders
from halftune.model.load.load import load_model
from halftune.model.tokenizer.tokenizer import end_of_turn_ids, load_tokenizer
from halftune.plan import explain, resolve

JSON = ("config.json", "generation_config.json")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with the builtin tokenizer."""
    folder = checkpoint(tmp_path_factory.mktemp("whole") / "model", vocab_size=4096)
    for name in TOKENIZER:
        if (materialize("qwen2-tiny") / name).is_file():
            shutil.copy(materialize("qwen2-tiny") / name, folder)
    return folder


def copy_of(whole: Path, here: Path) -> Path:
    shutil.rmtree(here / "model", ignore_errors=True)
    return Path(shutil.copytree(whole, here / "model"))


def use(folder: Path, *, load: bool) -> None:
    """What ``plan`` and the beginning of ``train`` do with a model's folder."""
    before = fingerprint(folder)
    recipe = {
        "model": {"name_or_path": str(folder)},
        "precision": "fp32",
        "data": {"train": "rows.jsonl", "max_length": 64, "cache": False},
        "training": {"output_dir": "run", "max_steps": 1},
    }
    Path("x.yaml").write_text(json.dumps(recipe))
    with answered():
        config = load_config("x.yaml").run
        plan = resolve(config, lookup("cpu", {}), read_model_facts(config.model))
        explain(plan)
        check_folders(config.model)
        tokenizer = load_tokenizer(config.model)
        end_of_turn_ids(tokenizer)
        prepare(config, tokenizer)
        if load:
            load_model(config.model, plan)
    assert fingerprint(folder) == before, "a file of the checkpoint was changed"


@budget(0.08, 12)
@given(name=st.sampled_from(JSON), damage=json_damages())
def test_odd_configs(here: Path, whole: Path, name: str, damage: Any) -> None:
    path = copy_of(whole, here) / name
    path.write_text(json.dumps(damage(json.loads(path.read_text()))), encoding="utf-8", errors="replace")
    use(path.parent, load=True)


@budget(0.06, 8)
@given(name=st.sampled_from((*JSON, "model.safetensors")), damage=damages(), begin=st.booleans())
def test_damaged_weights_and_configs(here: Path, whole: Path, name: str, damage: Damage, begin: bool) -> None:
    path = copy_of(whole, here) / name
    raw = path.read_bytes()
    header = 4096 if begin and name.endswith(".safetensors") else len(raw)
    path.write_bytes(damage(raw[:header]) + raw[header:])
    use(path.parent, load=True)


@budget(0.06, 10)
@given(name=st.sampled_from(TOKENIZER), damage=json_damages(), bytes_damage=damages(), of_bytes=st.booleans())
def test_tokenizers(here: Path, whole: Path, name: str, damage: Any, bytes_damage: Damage, of_bytes: bool) -> None:
    path = copy_of(whole, here) / name
    raw = path.read_bytes() if path.is_file() else b"{{ messages }}"
    if of_bytes or not name.endswith(".json"):
        path.write_bytes(bytes_damage(raw))
    else:
        path.write_text(json.dumps(damage(json.loads(raw))), encoding="utf-8", errors="replace")
    use(path.parent, load=False)


def test_the_undamaged_checkpoint_loads(here: Path, whole: Path) -> None:
    model = ModelSection(name_or_path=str(whole))
    assert read_model_facts(model).num_parameters_exact
    check_folders(model)
    assert load_tokenizer(model).chat_template
