"""A folder with Mistral's own ``tekken.json`` only: our tokens are those of mistral-common, which axolotl trains on."""

from __future__ import annotations

import json

import pytest
from tiny_tekken import write_tekken

from halftune.config.sections.model import ModelSection
from halftune.model.tokenizer.tokenizer import load_tokenizer

CONVERSATIONS = (
    [("user", " What \n is it?"), ("assistant", " Four. \n")],
    [("system", " Be brief. "), ("user", "a"), ("assistant", "b"), ("user", "c 12\n"), ("assistant", "\nd é日 ")],
)


@pytest.fixture
def folder(tmp_path):
    write_tekken(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    return tmp_path


def loaded(folder):
    return load_tokenizer(ModelSection(
        name_or_path="unused", tokenizer=str(folder), chat_template="mistral_v7_tekken",
        chat_template_kwargs={"trim_answers": True},
    ))  # fmt: skip


def ids_of(tokenizer, turns):
    messages = [{"role": role, "content": text} for role, text in turns]
    return tokenizer.apply_chat_template(messages, return_dict=False, trim_answers=True)


def test_control_tokens_and_text_are_found(folder):
    tokenizer = loaded(folder)
    assert tokenizer.is_fast
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token) == (1, 2, "<pad>")
    text = tokenizer.decode(ids_of(tokenizer, CONVERSATIONS[1]))
    assert text == ("<s>[SYSTEM_PROMPT] Be brief. [/SYSTEM_PROMPT][INST]a[/INST]b</s>[INST]c 12\n[/INST]\nd é日</s>")


@pytest.mark.parametrize("turns", CONVERSATIONS)
def test_tokens_are_those_of_mistral_common(turns, folder):
    pytest.importorskip("mistral_common", reason="mistral-common is not installed")
    from mistral_common.protocol.instruct.validator import ValidationMode
    from transformers.tokenization_mistral_common import MistralCommonBackend

    theirs = MistralCommonBackend.from_pretrained(folder, mode=ValidationMode.finetuning)
    messages = [{"role": role, "content": text} for role, text in turns]
    assert ids_of(loaded(folder), turns) == theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
