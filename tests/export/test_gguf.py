"""GGUF: the file holds the folder's tensors, vocabulary, template and stops; what llama.cpp lacks is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import FAMILIES, byte_level, folder, sentence_piece
from tiny_model import checkpoint, finished_run
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from halftune.cli import main
from halftune.core.errors import ModelError
from halftune.core.packaged import read_yaml
from halftune.export.gguf.vocabulary import CONTROL, UNUSED, USER_DEFINED, read_vocabulary
from halftune.export.gguf.write import compare, open_source, write_gguf

gguf = pytest.importorskip("gguf")
BPE = [row["name"] for row in read_yaml("halftune.export.gguf", "gguf.yaml")["pre_tokenizers"]]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {"qwen2": byte_level("qwen2"), "gemma": sentence_piece("never")}


def written(place: Path, family: str, tokenizer: Any, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    source = open_source(folder(place / family, family, tokenizer, dtype), tokenizer)
    write_gguf(source, place / "model.gguf", kind, "tiny")
    return source, place / "model.gguf"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_back(tmp_path: Path, family: str, tokenizers: dict[str, Any]) -> None:
    source, file = written(tmp_path, family, tokenizers["gemma" if family.startswith("gemma") else "qwen2"], "q8_0")
    count, error = compare(source, file, "q8_0")
    assert count > 20 if family != "gemma" else count == 20
    assert 1e-3 < error < 0.01


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_a_folder_in_the_files_format_is_kept_to_the_bit(
    tmp_path: Path, kind: str, dtype: torch.dtype, tokenizers: dict[str, Any]
) -> None:
    source, file = written(tmp_path, "llama", tokenizers["qwen2"], kind, dtype)
    assert compare(source, file, kind)[1] == 0


@pytest.mark.parametrize("broken", ["tensor", "tokens", "template"])
def test_a_file_that_differs_is_told(tmp_path: Path, broken: str, tokenizers: dict[str, Any]) -> None:
    source, file = written(tmp_path, "qwen3", tokenizers["qwen2"], "f16")
    raw = bytearray(file.read_bytes())
    if broken == "tensor":
        raw[-100] ^= 0x40
    else:
        where = raw.find(b"<tool_call>" if broken == "tokens" else b"assistant")
        raw[where + 3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ModelError) as caught:
        compare(source, file, "f16")
    assert caught.value.code == "export.gguf_differs"


@pytest.mark.parametrize("name", BPE)
def test_pre_tokenizers_are_known_by_what_they_split(name: str) -> None:
    assert read_vocabulary(byte_level(name)).pre == name


def test_the_vocabulary(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["qwen2"]
    rows = len(tokenizer) + 3
    words = read_vocabulary(tokenizer, rows)
    ids = {text: index for index, text in enumerate(words.tokens)}
    assert (len(words.tokens), words.types[-3:]) == (rows, [UNUSED] * 3)
    assert words.types[ids["<|end|>"]] == CONTROL
    assert words.types[ids["<tool_call>"]] == USER_DEFINED
    assert words.stops == {tokenizer.eos_token_id, ids["<|end|>"]}
    assert words.template == tokenizer.chat_template
    assert not words.add_bos


@pytest.mark.parametrize("what", ["pre_tokenizer", "unigram", "spaces", "merges"])
def test_a_tokenizer_without_its_like_in_llama_cpp_is_refused(what: str) -> None:
    tokenizer: Any = sentence_piece("never") if what == "merges" else byte_level("qwen2")
    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    if what == "pre_tokenizer":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    elif what == "spaces":
        raw["added_tokens"][0]["rstrip"] = True
    elif what == "merges":
        raw["model"]["merges"].pop()
    else:
        raw["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]], "byte_fallback": False}
    if what != "pre_tokenizer":
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(raw))
    with pytest.raises(ModelError) as caught:
        read_vocabulary(tokenizer)
    assert caught.value.code == "export.gguf_unsupported"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}),
        ("qwen2", {"head_dim": 32}),
        ("gemma2", {"query_pre_attn_scalar": 100}),
        ("gemma2", {"layer_types": ["full_attention"] * 3}),
        ("llama", {"model_type": "olmo"}),
    ],
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], tokenizers: dict[str, Any]
) -> None:
    tokenizer = tokenizers["gemma" if family == "gemma2" else "qwen2"]
    place = folder(tmp_path / "model", family, tokenizer)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError) as caught:
        open_source(place, tokenizer)
    assert caught.value.code == "export.gguf_unsupported"


def test_f16_cannot_hold_every_weight(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    from safetensors.torch import load_file, save_file

    place = folder(tmp_path / "model", "qwen3", tokenizers["qwen2"])
    weights = load_file(place / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        write_gguf(open_source(place, tokenizers["qwen2"]), tmp_path / "model.gguf", "f16", "tiny")
    assert caught.value.code == "export.beyond_range"


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = checkpoint(tmp_path / "base", torch.bfloat16, vocab_size=4096)
    run, out = finished_run(tmp_path / "run", base), tmp_path / "my-model"
    command = ["export", str(run), "--output", str(out), "--format", "gguf", "--gguf-type", "q8_0"]
    for arguments, expected in (
        (command, 0),
        (command, 3),
        ([*command, "--force"], 0),
        ([*command, "--dtype", "bf16"], 2),
    ):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == expected, capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == [
        "Modelfile",
        "README.md",
        "manifest.json",
        "my-model-q8_0.gguf",
    ]
    reader = gguf.GGUFReader(out / "my-model-q8_0.gguf")
    assert reader.fields["general.architecture"].contents() == "qwen2"
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert reader.fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
    assert {path.name for path in tmp_path.iterdir()} == {"base", "run", "my-model"}


def test_added_tokens_are_in_the_file(tmp_path: Path) -> None:
    """The base has no rows for them; the merged model does."""
    base = checkpoint(tmp_path / "base", vocab_size=4096)
    tokens = {"add": ["<a>", "<b>"], "pad_to_multiple_of": 64}
    model = {"name_or_path": str(base), "tokenizer": "builtin:qwen2-tiny", "tokens": tokens}
    run = finished_run(tmp_path / "run", base, model=model)
    with pytest.raises(SystemExit) as left:
        main(["export", str(run), "--output", str(tmp_path / "out"), "--format", "gguf"])
    assert left.value.code == 0
    (file,) = (tmp_path / "out").glob("*.gguf")
    words = gguf.GGUFReader(file).fields["tokenizer.ggml.tokens"].contents()
    assert len(words) == 4096 + 64
    assert words[4096:4098] == ["<a>", "<b>"]


def test_a_space_before_the_first_text_only_needs_a_template_that_begins_with_a_special_token() -> None:
    tokenizer = sentence_piece("first")
    assert not read_vocabulary(tokenizer).space_prefix
    assert read_vocabulary(sentence_piece("always")).space_prefix
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ModelError) as caught:
        read_vocabulary(tokenizer)
    assert caught.value.code == "export.gguf_unsupported"
