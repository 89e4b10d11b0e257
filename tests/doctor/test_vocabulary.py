"""A model with fewer embeddings than its tokenizer has tokens: said before training, in a chat, and by the doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_model import checkpoint, plan, section

from halftune.config.facts.model import read_model_facts
from halftune.config.facts.refused_values import TokenIds
from halftune.config.load import load_config
from halftune.config.sections.model import ModelSection
from halftune.config.sections.training import GenerationSection
from halftune.core.errors import ModelError
from halftune.doctor.recipe import _tokenizer
from halftune.hardware.catalogue import lookup
from halftune.model.generate import generate_reply
from halftune.model.load.load import load_model
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.model.tokenizer.vocabulary import padding_id
from halftune.plan import resolve
from halftune.train.run_folder.start_or_resume import RunFolder
from halftune.train.setup import build


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSection:
    folder = checkpoint(tmp_path_factory.mktemp("small") / "model", vocab_size=64)
    return section(folder, tokenizer="builtin:qwen2-tiny")


def test_the_doctor_counts(model: ModelSection) -> None:
    found = {finding.name: finding for finding in _tokenizer(model, read_model_facts(model))}
    assert found["tokenizer"].status == "fail"
    assert found["tokenizer"].what == "knows 4,096 tokens, the model has 64 embeddings"
    whole = section("builtin:qwen2-tiny")
    assert "tokenizer" not in {finding.name for finding in _tokenizer(whole, read_model_facts(whole))}


def test_nothing_is_trained(model: ModelSection, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "completion": "two"}\n' * 4)
    tree = {
        "model": {"name_or_path": model.name_or_path, "tokenizer": model.tokenizer},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 32},
        "training": {"output_dir": str(tmp_path / "run")},
    }
    (tmp_path / "x.yaml").write_text(json.dumps(tree))
    loaded = load_config(tmp_path / "x.yaml")
    settled = resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))
    with pytest.raises(ModelError, match=r"has id \d+, but the model has 64 embeddings"):
        build(loaded, settled, RunFolder(tmp_path, None, finished=False))


def test_nothing_is_answered(model: ModelSection) -> None:
    settled, generation = plan("fp32", "fp32"), GenerationSection(max_new_tokens=2)
    asked = [{"role": "user", "content": "one"}]
    loaded = load_model(model, settled, for_training=False)
    with pytest.raises(ModelError, match="the model has 64 embeddings"):
        generate_reply(loaded, load_tokenizer(model), asked, generation, settled)


def test_a_padding_token_that_came_after_training_needs_no_embedding(model: ModelSection) -> None:
    loaded, tokenizer = load_model(model, plan("fp32", "fp32")), load_tokenizer(model)
    assert padding_id(loaded, tokenizer) == tokenizer.pad_token_id == 0
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert tokenizer.pad_token_id >= 64
    assert padding_id(loaded, tokenizer) == tokenizer.eos_token_id == 2
    tokenizer.eos_token = "<pad>"
    assert padding_id(loaded, tokenizer) == 0


def test_the_plan_reads_it_from_files(model: ModelSection, tmp_path: Path) -> None:
    facts = read_model_facts(model)
    assert facts.tokens == TokenIds(4096, 4096)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "completion": "two"}\n')
    added = [{"id": 70, "content": '"vocab": {'}]
    vocabulary = {"type": "BPE", "vocab": {"a": 0, "vocab": 63}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": vocabulary}))
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"71": {"content": "<pad>"}}}')
    beside = model.model_copy(update={"tokenizer": str(tmp_path)})
    assert read_model_facts(beside).tokens == TokenIds(64, 72)
    for named, says in (
        (model, "The tokenizer has 4,096 tokens, the model 64 emb"),
        (beside, "go up to id 71, the mo"),
    ):
        tree = {
            "model": {"name_or_path": named.name_or_path, "tokenizer": named.tokenizer},
            "data": {"train": str(tmp_path / "rows.jsonl")},
            "training": {"output_dir": str(tmp_path / "run")},
        }
        (tmp_path / "x.yaml").write_text(json.dumps(tree))
        warnings = resolve(load_config(tmp_path / "x.yaml").run, lookup("a100"), read_model_facts(named)).warnings
        assert any(says in warning for warning in warnings)
