"""Tokenizers trained here, one chat template each, and the shortest way to a run's configuration."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from halftune.config.run import RunConfig

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>")
MORE_SPECIAL = ("<|eot_id|>", "<bos>", "<eos>")
CONTENT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
FRAME_TOKENS = ("<start_of_turn>", "<end_of_turn>")  # not special, as in the first Gemma
ENDS = {
    "llama3": {"bos_token": "<s>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
}
TEXT = "system\nYou are a helpful assistant.\nuser\nassistant\nmodel\n"
TEXT += "What is the answer? The answer is four, as two and two make four. Zwei und zwei ist vier! 你好，世界。"


@pytest.fixture(scope="session")
def templates() -> ModuleType:
    """The module of chat templates beside this file."""
    spec = importlib.util.spec_from_file_location("chat_templates", Path(__file__).parent / "templates.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def backend() -> str:
    """A byte-level BPE of 500 tokens with the special tokens of several families, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.add_special_tokens([*SPECIAL, *MORE_SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*CONTENT_TOKENS, *FRAME_TOKENS)])
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def make_tokenizer(backend: str, templates: ModuleType) -> Callable[..., PreTrainedTokenizerFast]:
    """Makes a tokenizer with the chat template of a family, or with a template given."""

    def make(family: str = "qwen2", template: str | None = None) -> PreTrainedTokenizerFast:
        ends = ENDS.get(family, {"eos_token": "<|im_end|>"})
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(backend), pad_token="<|endoftext|>", **ends
        )
        tokenizer.chat_template = template or templates.FAMILIES.get(family)
        return tokenizer

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """A tokenizer with the Qwen2 template."""
    return make_tokenizer()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has an empty cache of its own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HALFTUNE_CACHE", str(folder))
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSON lines, or a text as it is; returns the path."""

    def write(content: list[Any] | str, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def make_config() -> Callable[..., RunConfig]:
    """A run's configuration from the keys of its data section."""

    def make(
        train: Any, *, method: Any = "sft", batch: int = 4, template: dict[str, Any] | None = None, **data: Any
    ) -> RunConfig:
        return RunConfig.model_validate(
            {
                "model": {"name_or_path": "unused", "chat_template_kwargs": template or {}},
                "data": {"train": train, **data},
                "method": method,
                "training": {"output_dir": "unused", "per_device_train_batch_size": batch},
            }
        )

    return make
