"""A folder with Mistral's own ``tekken.json`` only: our tokens are those of mistral-common, which axolotl trains on."""

from __future__ import annotations

import base64
import json

import pytest

from halftune.config.sections.model import ModelSection
from halftune.model.tokenizer.tokenizer import load_tokenizer

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
           "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
           "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]",
           "[/THINK]")  # fmt: skip
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONVERSATIONS = (
    [("user", " What \n is it?"), ("assistant", " Four. \n")],
    [("system", " Be brief. "), ("user", "a"), ("assistant", "b"), ("user", "c 12\n"), ("assistant", "\nd é日 ")],
)


@pytest.fixture
def folder(tmp_path):
    """A folder with the 256 bytes and a few words as vocabulary."""
    words = [bytes([one]) for one in range(256)] + [b"th", b"is", b" i", b"br", b" is", b"ie", b"our", b"ou"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(dict.fromkeys(words))
    ]
    special = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIAL)]
    size = len(vocabulary) + 40
    settings = {"pattern": PATTERN, "num_vocab_tokens": len(vocabulary), "default_vocab_size": size,
                "default_num_special_tokens": 40, "version": "v13"}  # fmt: skip
    everything = {"config": settings, "vocab": vocabulary, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(everything))
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
