"""Small folders of the families that are written as GGUF, and tokenizers of each kind, for tests."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from halftune.core.packaged import read_yaml
from halftune.export.gguf.vocabulary import SPACE
from halftune.model.files.architectures import no_progress_bars

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": (
        "qwen2",
        {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 32, "num_hidden_layers": 3}),
    "gemma3": ("gemma3_text", {"sliding_window": 8, "query_pre_attn_scalar": 32, "num_hidden_layers": 7}),
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|turn|>", "<|end|>"]
WORDS = [
    "the merged model answers",
    "as it was trained to:",
    "don't we'll 2024 12345",
    "Grüße, naïve café",
    "日本語",
    "\t\n\n x",
]
CORPUS = [f"{one} {other}" for one in WORDS for other in WORDS]


def byte_level(name: str) -> PreTrainedTokenizerFast:
    """A small byte-level tokenizer with a pre-tokenizer of gguf.yaml."""
    rows = {row["name"]: row for row in read_yaml("halftune.export.gguf", "gguf.yaml")["pre_tokenizers"]}
    row = rows[name]
    raw = Tokenizer(models.BPE(ignore_merges=row.get("ignore_merges", False)))
    raw.pre_tokenizer = pre_tokenizers.Sequence([*map(_step, row["steps"]), *_bytes(row["steps"])])
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return _finished(raw)


def _step(text: str) -> Any:
    if text == "ByteLevel":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if text == "Digits":
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(text), behavior="isolated")


def _bytes(steps: list[str]) -> list[Any]:
    return [] if "ByteLevel" in steps else [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def sentence_piece(prefix: str) -> PreTrainedTokenizerFast:
    """A small tokenizer whose merges have all pairs of a token, as those of SentencePiece.

    It puts a space before no text (Gemma), before every text between special tokens (Llama 2), or before the first.
    """
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", SPACE)
    letters = [*string.printable, SPACE, "ü", "ß"]
    learner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False)
    )
    pieces = [text for text, _ in sorted(learner.get_vocab().items(), key=lambda one: one[1]) if text not in "日本語"]
    tokens = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {text: index for index, text in enumerate(dict.fromkeys(tokens))}
    merges = [
        (text[:cut], text[cut:])
        for text in pieces
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    raw = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", SPACE)
    if prefix == "first":
        raw.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    else:
        always = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        raw.normalizer = always if prefix == "always" else replace
    raw.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(raw)


def _finished(raw: Tokenizer) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        additional_special_tokens=SPECIAL[3:],
    )
    made.add_tokens(["<tool_call>"])
    made.chat_template = TEMPLATE
    return made


def folder(place: Path, family: str, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype = torch.float32) -> Path:
    """A Hugging Face folder with random weights, whose embedding has more rows than there are tokens."""
    kind, changes = FAMILIES[family]
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **{**SIZES, **ids, "vocab_size": len(tokenizer) + 5, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            spread = 0.1 if parameter.ndim < 2 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.data = (parameter.data * (parameter.ndim < 2) + spread * torch.randn(parameter.shape)).to(dtype)
            assert name
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")]
    with no_progress_bars():
        model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place
