"""llama.cpp computes and tokenises what the exported folder does; runs where llama-cpp-python is installed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import CORPUS, FAMILIES, byte_level, folder, sentence_piece
from transformers import AutoModelForCausalLM

from halftune.core.packaged import read_yaml
from halftune.export.gguf.write import open_source, write_gguf

llama_cpp = pytest.importorskip("llama_cpp")
BPE = [row["name"] for row in read_yaml("halftune.export.gguf", "gguf.yaml")["pre_tokenizers"]]
EPS = {"f16": 2**-10, "bf16": 2**-7, "q8_0": 2**-7}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.float32}
LETTERS = "abcXYZ 019.,'\n\t\r-_()äßéçñЖд日本語한국 😀🦙\u200d\u00a0"


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    made = {name: byte_level(name) for name in BPE}
    return {**made, "gemma": sentence_piece("never"), **{one: sentence_piece(one) for one in ("always", "first")}}


def opened(place: Path, family: str, tokenizer: Any, kind: str) -> tuple[Any, Any]:
    """The folder's model in fp32, and llama.cpp's."""
    source = open_source(folder(place / "folder", family, tokenizer, DTYPES[kind]), tokenizer)
    write_gguf(source, place / "model.gguf", kind, "tiny")
    theirs = llama_cpp.Llama(str(place / "model.gguf"), n_ctx=128, logits_all=True, verbose=False, n_threads=1)
    return AutoModelForCausalLM.from_pretrained(place / "folder", dtype=torch.float32).eval(), theirs


def texts(count: int = 500) -> list[str]:
    """Words that the tokenizers know, and random ones in several scripts."""
    chance = random.Random(0)
    known = [" ".join(chance.choices(CORPUS, k=chance.randint(1, 3))) for _ in range(count // 2)]
    odd = ["".join(chance.choices(LETTERS, k=chance.randint(1, 60))) for _ in range(count - count // 2)]
    return known + odd


@pytest.mark.parametrize("kind", EPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_answers(tmp_path: Path, family: str, kind: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["gemma" if family.startswith("gemma") else "qwen2"]
    ours, theirs = opened(tmp_path, family, tokenizer, kind)
    ids = torch.randint(300, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = ours(ids).logits[0].double()
    theirs.eval(ids[0].tolist())
    actual = torch.tensor(theirs.scores[:40]).double()
    error = float((actual - expected).norm() / expected.norm())
    assert error < 8 * EPS[kind]
    certain = expected.topk(2).values.diff().abs()[:, 0] > 4 * error * expected.norm(dim=1) / expected.shape[1] ** 0.5
    assert certain.sum() > 10
    assert torch.equal(actual.argmax(1)[certain], expected.argmax(1)[certain])
    if kind == "f16":
        question = ids[0, :12].tolist()
        with torch.inference_mode():
            answer = ours.generate(ids[:, :12], max_new_tokens=12, do_sample=False, eos_token_id=-1)[0, 12:].tolist()
        theirs.reset()
        tokens = theirs.generate(question, temp=0.0, repeat_penalty=1.0)
        assert [next(tokens) for _ in answer] == answer


@pytest.mark.parametrize("name", [*BPE, "gemma", "always", "first"])
def test_tokens_of_500_texts(tmp_path: Path, name: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[name]
    family = "gemma2" if name == "gemma" else "llama"
    _, theirs = opened(tmp_path, family, tokenizer, "f16")
    conversations = [[{"role": "user", "content": text}] for text in texts()]
    rendered = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in conversations]
    assert all(one.startswith("<s>") for one in rendered)
    for text in [*(texts() if name != "first" else ()), *rendered]:
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert theirs.tokenize(text.encode(), add_bos=False, special=True) == expected, text


@pytest.mark.parametrize("name", ["qwen2", "gemma"])
def test_special_tokens_and_stops(tmp_path: Path, name: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[name]
    _, theirs = opened(tmp_path, "gemma" if name == "gemma" else "qwen3", tokenizer, "f16")
    vocabulary = llama_cpp.llama_model_get_vocab(theirs._model.model)
    ends = {index for index in range(len(tokenizer)) if llama_cpp.llama_vocab_is_eog(vocabulary, index)}
    assert ends == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")}
    assert theirs.token_bos() == tokenizer.bos_token_id
    assert theirs.metadata["tokenizer.chat_template"] == tokenizer.chat_template
