"""Tokens of a recipe's own: grown embeddings, exact resume, export, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import checkpoint, section
from transformers import AutoModelForCausalLM, AutoTokenizer

from halftune.cli import main
from halftune.config.sections.model import SpecialTokens, TokensSection
from halftune.core.errors import ModelError
from halftune.data.templates.control_tokens import special_tokens
from halftune.infer.session import open_session
from halftune.model.files.builtin import materialize
from halftune.model.result.completed_run import open_run
from halftune.model.tokenizer.added_tokens import add_rows, add_tokens, visible_text
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.model.tokenizer.vocabulary import is_tied
from halftune.plan.weights.added_tokens import rows_for

TOKENS = {"add": ["<|note|>", "<|end_note|>"], "special": {"pad": "<|note|>"}, "pad_to_multiple_of": 16}


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def base_of(folder: Path, like: str) -> Path:
    """A tiny checkpoint whose embedding has a row for each token of the builtin tokenizer, and no more."""
    made = checkpoint(folder, like=like, vocab_size=4096)
    for file in materialize("qwen2-tiny").glob("*token*"):
        shutil.copy(file, made)
    for file in materialize("qwen2-tiny").glob("*.jinja"):
        shutil.copy(file, made)
    return made


def halftune(*arguments: str) -> None:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert not done.value.code


def train(folder: Path, base: Path, adapter: str) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"word {i}"}]}
        for i in range(8)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model": {"name_or_path": str(base), "tokens": TOKENS},
        "data": {"train": [str(folder / "data.jsonl")], "max_length": 64},
        "precision": "fp32",
        "adapter": {"type": adapter},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 4,
            "save_steps": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
        },
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    halftune("train", "--config", str(folder / "recipe.yaml"))
    return folder / "run"


def grow(model: Any, base: Path, *, lazy: bool) -> None:
    asked = section(base, tokens=TOKENS)
    add_rows(model, len(load_tokenizer(asked)), asked.tokens, lazy=lazy)


@pytest.mark.parametrize(("like", "tied"), [("qwen2-tiny", True), ("llama-tiny", False)])
def test_new_rows_are_the_mean_of_the_old_ones(like: str, tied: bool, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", like)
    model, before = loaded(base), loaded(base)
    grow(model, base, lazy=False)
    assert is_tied(model) == is_tied(before) == tied
    assert model.config.vocab_size == 4112
    for get in ("get_input_embeddings", "get_output_embeddings"):
        new, old = getattr(model, get)().weight, getattr(before, get)().weight
        assert new.shape[0] == 4112
        assert torch.equal(new[:4096], old)
        assert torch.equal(new[4096:], old.float().mean(0).expand(16, -1))


def test_rows() -> None:
    assert rows_for(100, 98, TokensSection(pad_to_multiple_of=64)) == 100
    assert rows_for(100, 102, TokensSection()) == 102
    assert rows_for(100, 102, TokensSection(pad_to_multiple_of=64)) == 128


@pytest.mark.slow
@pytest.mark.parametrize("like", ["qwen2-tiny", "llama-tiny"])
@pytest.mark.parametrize("adapter", ["lora", "ia3", "none"])
def test_resume_is_exact_and_the_export_is_a_plain_model(like: str, adapter: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", like)
    run = train(tmp_path, base, adapter)
    (name,) = {path.name for path in (run / "final").glob("*model.safetensors")}
    whole = load_file(run / "final" / name)
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoint-4")
    train(tmp_path, base, adapter)
    again = load_file(run / "final" / name)
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[key], again[key]) for key in whole)

    out = tmp_path / "out"
    halftune("export", str(run), "--output", str(out))
    tokenizer, model = AutoTokenizer.from_pretrained(out), loaded(out)
    ids = tokenizer("<|end_note|> and <|note|>")["input_ids"]
    assert max(ids) >= 4096
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == 4112
    assert is_tied(model) == (like == "qwen2-tiny")
    assert tokenizer.pad_token == "<|note|>"
    session = open_session(open_run(str(run)))
    with torch.no_grad():
        expected = session.model(torch.tensor([ids])).logits.float()
        torch.testing.assert_close(model(torch.tensor([ids])).logits.float(), expected, atol=1e-4, rtol=1e-4)


def test_a_special_token_that_nothing_adds_is_refused() -> None:
    tokenizer = load_tokenizer(section("builtin:qwen2-tiny"))
    with pytest.raises(ModelError) as error:
        add_tokens(tokenizer, TokensSection(special=SpecialTokens(eos="<|none|>")))
    assert error.value.code == "config.unknown_special_token"


def test_quantised_and_sharded_embeddings_are_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "qwen2-tiny")
    model = loaded(base)
    with pytest.raises(ModelError) as error:
        grow(model, base, lazy=True)
    assert error.value.code == "model.tokens_unsupported"
    embedding = model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embedding.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ModelError) as error:
        grow(model, base, lazy=False)
    assert error.value.code == "model.tokens_unsupported"


def test_added_tokens_of_thoughts_are_content_and_others_are_seen_by_rewards() -> None:
    tokenizer = load_tokenizer(section("builtin:qwen2-tiny", tokens={"add": ["<think>", "<|mark|>"]}))
    think, mark = tokenizer.convert_tokens_to_ids(["<think>", "<|mark|>"])
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    assert "<|mark|>" in special
    assert "<think>" not in special
    assert "<think>" not in special_tokens(tokenizer)
    end = tokenizer.eos_token_id
    ids = [think, *tokenizer("so").input_ids, mark, end]
    assert visible_text(tokenizer, ids, ["<|mark|>"]) == "<think>so<|mark|>"
    assert visible_text(tokenizer, ids, []) == "<think>so"
