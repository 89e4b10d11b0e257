"""Answers: under the plan, streamed whole, ended where the turn ends, the model left as it was."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import checkpoint, plan, section
from transformers import GenerationConfig

from halftune.config.sections.model import LoraAdapter
from halftune.config.sections.training import GenerationSection
from halftune.core.errors import ModelError
from halftune.model.adapters import attach_adapter
from halftune.model.files.builtin import materialize
from halftune.model.generate import ending_ids, generate_reply
from halftune.model.load.load import load_model
from halftune.model.tokenizer.tokenizer import load_tokenizer

ASK = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(section("builtin:qwen2-tiny"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model", vocab_size=4096)


def scripted(model: torch.nn.Module, tokens: list[int]) -> None:
    """Makes the model say these tokens, whatever it is asked."""
    steps = iter(tokens)

    def say(module: torch.nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros_like(logits)
        logits[:, -1, next(steps)] = 10
        return logits

    model.get_output_embeddings().register_forward_hook(say)


def test_streams_whole_characters_and_stops_at_the_end_of_the_turn(folder: Path, tokenizer) -> None:
    model = load_model(section(folder), plan(), for_training=False)
    text = "naïve 漢字 🙂 ok"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    scripted(model, [*tokenizer(f" {text}\n")["input_ids"], end, *[50] * 20])
    pieces: list[str] = []
    reply = generate_reply(model, tokenizer, ASK, GenerationSection(max_new_tokens=60), plan(), pieces.append)
    assert reply == text
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_checkpoint_and_template_both_say_what_ends_an_answer(tokenizer) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ending_ids(tokenizer, GenerationConfig(eos_token_id=None)) == [end]
    assert ending_ids(tokenizer, GenerationConfig(eos_token_id=[end + 7, end + 5])) == [end, end + 5, end + 7]


def test_stops_at_the_limit(folder: Path, tokenizer) -> None:
    model = load_model(section(folder), plan(), for_training=False)
    scripted(model, [tokenizer("a")["input_ids"][0]] * 9)
    assert generate_reply(model, tokenizer, ASK, GenerationSection(max_new_tokens=5), plan()) == "aaaaa"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_model_with_nan_has_no_answer(folder: Path, tokenizer, temperature: float) -> None:
    model = load_model(section(folder), plan(), for_training=False)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ModelError) as refused:
        generate_reply(model, tokenizer, ASK, GenerationSection(max_new_tokens=5, temperature=temperature), plan())
    assert refused.value.code == "infer.non_finite"


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_training_goes_on_as_before(folder: Path, tokenizer, storage: str) -> None:
    made = plan(storage, "fp32", checkpointing=True)
    model = attach_adapter(load_model(section(folder), made), LoraAdapter(rank=2, dropout=0.5), made, 0)
    model.get_base_model().model.norm.eval()  # a part that training itself keeps in evaluation mode
    modes = {name: module.training for name, module in model.named_modules()}
    own = model.get_base_model().generation_config
    seen: list[torch.dtype] = []
    model.get_base_model().model.layers[1].mlp.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    first = generate_reply(model, tokenizer, ASK, GenerationSection(max_new_tokens=4), made)
    assert generate_reply(model, tokenizer, ASK, GenerationSection(max_new_tokens=4), made) == first, "no dropout"
    assert set(seen) == {torch.float32 if storage == "fp32" else torch.bfloat16}
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert model.get_base_model().generation_config is own
    assert model.get_base_model().config.use_cache is False


def test_an_interrupt_leaves_the_mode_alone(folder: Path, tokenizer) -> None:
    model = load_model(section(folder), plan())

    def stop(_: str) -> None:
        raise KeyboardInterrupt

    scripted(model, tokenizer("a b c d")["input_ids"] * 4)
    with pytest.raises(KeyboardInterrupt):
        generate_reply(model, tokenizer, ASK, GenerationSection(), plan(), stop)
    assert model.training


def test_the_checkpoints_own_decoding_settings_have_no_say(folder: Path, tokenizer, capfd) -> None:
    model = load_model(section(folder), plan(), for_training=False)
    model.generation_config.update(do_sample=True, temperature=5.0, top_k=3, max_new_tokens=1, repetition_penalty=3.0)
    settings = GenerationSection(max_new_tokens=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replies = {generate_reply(model, tokenizer, ASK, settings, plan()) for _ in range(3)}
    assert len(replies) == 1
    assert capfd.readouterr().err == ""
    other = load_model(section(folder), plan(), for_training=False)
    assert replies == {generate_reply(other, tokenizer, ASK, settings, plan())}


def test_what_our_settings_leave_open_is_not_filled_in_by_the_checkpoints(folder: Path, tokenizer) -> None:
    model = load_model(section(folder), plan(), for_training=False)
    model.generation_config.update(no_repeat_ngram_size=1, suppress_tokens=tokenizer("a")["input_ids"])
    scripted(model, tokenizer("a")["input_ids"] * 9)
    assert generate_reply(model, tokenizer, ASK, GenerationSection(max_new_tokens=4), plan()) == "aaaa"


def test_sampling_follows_the_seed(folder: Path, tokenizer) -> None:
    model = load_model(section(folder), plan(), for_training=False)
    settings = GenerationSection(max_new_tokens=8, temperature=1.5, top_p=0.9, top_k=50)
    replies = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        replies.append(generate_reply(model, tokenizer, ASK, settings, plan()))
    assert replies[0] == replies[1] != replies[2]


def test_too_long_a_conversation(tmp_path: Path, tokenizer) -> None:
    folder = checkpoint(tmp_path / "short", vocab_size=4096, max_position_embeddings=24)
    model = load_model(section(folder), plan(), for_training=False)
    with pytest.raises(ModelError, match=r"\d+ tokens; .*limit is 24"):
        generate_reply(model, tokenizer, [{"role": "user", "content": "word " * 30}], GenerationSection(), plan())
    scripted(model, tokenizer("a")["input_ids"] * 100)
    reply = generate_reply(model, tokenizer, ASK, GenerationSection(max_new_tokens=100), plan())
    prompt = tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True)
    assert len(reply) == 24 - len(tokenizer(prompt)["input_ids"]), "an answer ends where the context does"


def test_without_a_template_the_text_is_continued(folder: Path) -> None:
    tokenizer = load_tokenizer(section(materialize("qwen2-tiny")))
    tokenizer.chat_template = None
    model = load_model(section(folder), plan(), for_training=False)
    fed: list[list[int]] = []
    model.get_input_embeddings().register_forward_hook(lambda m, args, out: fed.append(args[0].flatten().tolist()))
    generate_reply(
        model, tokenizer, [{"role": "user", "content": "def f("}], GenerationSection(max_new_tokens=2), plan()
    )
    assert fed[0] == tokenizer("def f(")["input_ids"]
