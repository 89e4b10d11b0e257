"""The builtin models: made whole, deterministic, with a tokenizer and a template that do what chat needs."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from halftune.config.builtin_models import BUILTIN_MODELS, VOCAB_SIZE
from halftune.config.facts.safetensors_headers import read_headers
from halftune.core.errors import ModelError, TrainingError
from halftune.core.manifest import MANIFEST
from halftune.model.files import builtin
from halftune.model.files.builtin import materialize

PARAMETERS = {
    "qwen2-tiny": 3e6,
    "qwen2-small": 25e6,
    "llama-tiny": 3.7e6,
    "qwen3_5-tiny": 3e6,
    "kimi_linear-tiny": 3.4e6,
    "mamba2-tiny": 2.3e6,
    "rwkv7-tiny": 3.6e6,
    "qwen2_5_vl-tiny": 3.6e6,
    "qwen2_audio-tiny": 4.0e6,
    "qwen2_5_omni-tiny": 3.9e6,
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(materialize("qwen2-tiny"))


def test_a_fresh_cache_gets_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = materialize("qwen2-tiny")
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / f".{known.name}.writing").mkdir()  # what a killed process leaves
    fresh = materialize("qwen2-tiny")
    assert fresh != known
    assert {file.name: file.read_bytes() for file in known.iterdir()} == {
        file.name: file.read_bytes() for file in fresh.iterdir()
    }
    assert not list((tmp_path / "models").glob(".*.writing"))


def test_a_full_disk_under_the_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_folder: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # the class and words of tokenizers

    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "write_tokenizer", full)
    with pytest.raises(TrainingError) as caught:
        builtin.materialize("qwen2-tiny")
    assert (caught.value.code, caught.value.where) == ("core.cache_not_writable", str(tmp_path / "models"))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json", MANIFEST])
def test_a_damaged_model_in_the_cache_is_made_anew(tmp_path: Path, monkeypatch, name: str) -> None:
    known = materialize("qwen2-tiny")
    target = tmp_path / "models" / known.name
    tokenizer = known.with_name(known.name.replace("qwen2-tiny", "tokenizer"))
    for folder in (known, tokenizer):
        shutil.copytree(folder, tmp_path / "models" / folder.name)
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path))
    content = bytearray((target / name).read_bytes())
    content[len(content) // 2] ^= 1
    (target / name).write_bytes(content)
    assert materialize("qwen2-tiny") == target
    assert (target / name).read_bytes() == (known / name).read_bytes()


@pytest.mark.parametrize("name", sorted(BUILTIN_MODELS))
def test_sizes_and_dtype_are_what_the_plan_is_told(name: str) -> None:
    folder = materialize(name)
    config = json.loads((folder / "config.json").read_text())
    for section in ("", "text_config", "vision_config", "audio_config"):
        told, written = (one.get(section, {}) if section else one for one in (BUILTIN_MODELS[name], config))
        told = {key: value for key, value in told.items() if value is not None and not isinstance(value, dict)}
        assert {key: written.get(key) for key in told} == told
    headers = read_headers(folder)
    assert {dtype for dtype, _ in headers.values()} == {"F32"}
    assert sum(math.prod(shape) for _, shape in headers.values()) == pytest.approx(PARAMETERS[name], rel=0.07)


def test_a_config_that_transformers_completes_changes_no_other_model() -> None:
    before = copy.deepcopy(BUILTIN_MODELS["qwen2-tiny"])
    AutoConfig.for_model(**{**BUILTIN_MODELS["llama-tiny"], "model_type": "gemma3_text"})
    assert BUILTIN_MODELS["qwen2-tiny"] == before


def test_making_one_leaves_the_random_state_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halftune.model.files import builtin

    tokenizer = materialize("qwen2-tiny").parent / materialize("qwen2-tiny").name.replace("qwen2-tiny", "tokenizer")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    builtin._write_model("qwen2-tiny", tmp_path, tokenizer)
    assert torch.equal(torch.get_rng_state(), before)


def test_unknown_name_and_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"no builtin model 'qwen2-tinny'.*did you mean qwen2-tiny"):
        materialize("qwen2-tinny")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "file"))
    with pytest.raises(TrainingError, match="HALFTUNE_CACHE"):
        materialize("qwen2-tiny")


def test_tokenizer_round_trips_and_knows_its_control_tokens(tokenizer) -> None:
    text = "def f(x):\n\treturn 'naïve ☃ 漢字 🙂'  # 12345\r\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == VOCAB_SIZE
    assert (tokenizer.pad_token_id, tokenizer.eos_token) == (0, "<|im_end|>")
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert len(tokenizer("<|im_start|><tool_call></tool_call><|im_end|>")["input_ids"]) == 4
    assert tokenizer.decode(tokenizer("<tool_call>x</tool_call>")["input_ids"], skip_special_tokens=True) == (
        "<tool_call>x</tool_call>"
    )


@pytest.mark.parametrize("name", sorted(BUILTIN_MODELS))
def test_every_builtin_reloads_the_same_tokenizer(name: str, tokenizer) -> None:
    text = "The quick brown fox's 42 jumps\n\n    over it."
    other = AutoTokenizer.from_pretrained(materialize(name))
    assert other(text)["input_ids"] == tokenizer(text)["input_ids"]
    if not BUILTIN_MODELS[name].keys() & {"vision_config", "audio_config"}:
        assert other.chat_template == tokenizer.chat_template
    asked = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    assert other.apply_chat_template(asked, tokenize=False) == tokenizer.apply_chat_template(asked, tokenize=False)


def test_template_writes_no_system_prompt_of_its_own(tokenizer) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    turns = [{"role": "system", "content": "Be brief."}, *turns, {"role": "assistant", "content": "Hello"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
    )


def test_template_renders_tools_calls_and_results(tokenizer) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2, 3+3?"},
        {
            "role": "assistant",
            "content": "Let me add.",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é"}}},
                {"type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}},
            ],
        },
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "4 and 6."},
    ]
    text = tokenizer.apply_chat_template(turns, tools=[TOOL], tokenize=False)
    head, _, rest = text.partition("<|im_end|>\n")
    assert head.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.loads(head.split("<tools>\n")[1].split("\n")[0]) == TOOL
    assert rest == (
        "<|im_start|>user\n2+2, 3+3?<|im_end|>\n"
        "<|im_start|>assistant\nLet me add.\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n4 and 6.<|im_end|>\n"
    )


def test_the_tokenizer_learns_nothing_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_sysconfigdata__linux_x86_64-linux-gnu.py", "abc.py", "sitecustomize.py", "usercustomize.py"):
        (tmp_path / name).write_text(f"# {name}\n" * 100_000)
    monkeypatch.setattr(builtin.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert list(builtin._corpus()) == ["# abc.py\n" * 100_000]
