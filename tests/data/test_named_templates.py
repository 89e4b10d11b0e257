"""Every chat template by name: its text, and the answers that the mask finds in it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from halftune.config.chat_templates import find_template, template_for, templates
from halftune.core.errors import ModelError
from halftune.data.formats.conversation import Conversation, RowError
from halftune.data.templates.loss_mask import render_turns
from halftune.data.templates.render import ChatTemplate
from halftune.model.tokenizer.named_templates import use_template

QUESTION, ANSWER, AGAIN, LAST = "What is two?", "Two is two.", "And four?", "Four is four."
TURNS = [("user", QUESTION), ("assistant", ANSWER), ("user", AGAIN), ("assistant", LAST)]
# A system, a user and an assistant message as the authors of each format publish it.
PUBLISHED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n",
    "qwen3": (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nA<|im_end|>\n"
    ),
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s>",
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    ),
    "llama4": (
        "<s><|header_start|>system<|header_end|>\n\nS<|eot|><|header_start|>user<|header_end|>\n\n"
        "U<|eot|><|header_start|>assistant<|header_end|>\n\nA<|eot|>"
    ),
    "mistral_v1": "<s> [INST] S\n\nU [/INST] A</s>",
    "mistral": "<s>[INST] S\n\nU[/INST] A</s>",
    "mistral_v3_tekken": "<s>[INST]S\n\nU[/INST]A</s>",
    "mistral_v7": "<s>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] U[/INST] A</s>",
    "mistral_v7_tekken": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]A</s>",
    "voxtral": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]A</s>",
    "gemma3": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n",
    "phi4": (
        "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>U<|im_end|>"
        "<|im_start|>assistant<|im_sep|>A<|im_end|>"
    ),
    "deepseek_v2": "<s>S\n\n<｜User｜>U<｜Assistant｜>A</s>",
    "deepseek_v3": "<s>S<｜User｜>U<｜Assistant｜>A</s>",
    "command_r": (
        "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>"
        "U<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>A<|END_OF_TURN_TOKEN|>"
    ),
    "granite": (
        "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>U<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>A<|end_of_text|>\n"
    ),
    "zephyr": "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\nA</s>\n",
    "vicuna": "<s>S USER: U ASSISTANT: A</s>",
    "alpaca": "<s>S\n\n### Instruction:\nU\n\n### Response:\nA</s>",
    "openchat": (
        "<s>GPT4 Correct System: S<|end_of_turn|>GPT4 Correct User: U<|end_of_turn|>GPT4 Correct Assistant: "
        "A<|end_of_turn|>"
    ),
    "exaone": "[|system|]S[|endofturn|]\n[|user|]U\n[|assistant|]A[|endofturn|]\n",
    "jamba": "<s><|bom|><|system|> S<|eom|><|bom|><|user|> U<|eom|><|bom|><|assistant|> A<|eom|>",
    "tulu": "<|system|>\nS\n<|user|>\nU\n<|assistant|>\nA</s>",
}


def made(backend: str, name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the tokens and the template of a format."""
    row = find_template(name)
    assert row is not None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend), bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens([*row.tokens, *((row.end,) if row.end != "{eos}" else ())], special_tokens=True)
    use_template(tokenizer, row)
    return tokenizer


def conversation(turns: list[tuple[str, str]], tools: list | None = None) -> Conversation:
    messages = [{"role": role, "content": text} for role, text in turns]
    return Conversation(messages=messages, train=(None,) * len(messages), tools=tools)


@pytest.mark.parametrize("name", [row.name for row in templates()])
def test_the_mask_finds_both_answers_and_their_ends(name, backend):
    tokenizer = made(backend, name)
    template = ChatTemplate(tokenizer)
    rendering = render_turns(template, conversation(TURNS), "assistant")
    read = template.control.readable
    first, last = (read(rendering.text[turn.start : turn.end]) for turn in rendering.turns)
    ends = "" if find_template(name).last is not None else tokenizer.eos_token
    assert first.lstrip().startswith(ANSWER)
    assert last.rstrip().endswith(ends or tokenizer.eos_token)
    assert LAST in last
    assert AGAIN not in first
    assert QUESTION in read(rendering.text[: rendering.turns[0].start])
    if ends:
        assert first.rstrip().endswith(ends)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_text_is_the_published_one(name, backend):
    tokenizer = made(backend, name)
    messages = [{"role": role, "content": role[0].upper()} for role in ("system", "user", "assistant")]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == PUBLISHED[name]


def test_reasoning_stays_behind_the_last_question_only(backend):
    tokenizer = made(backend, "qwen3")
    turns = [(role, f"<think>\nhm\n</think>\n\n{text}" if role == "assistant" else text) for role, text in TURNS]
    text = tokenizer.apply_chat_template([{"role": role, "content": said} for role, said in turns], tokenize=False)
    assert isinstance(text, str)
    assert text.count("<think>\nhm\n</think>\n\n") == 1
    assert text.index("<think>") > text.index(AGAIN)


def test_tools_need_a_format_that_defines_them(backend):
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    asked = conversation(TURNS, tools=[tool])
    with pytest.raises(RowError) as error:
        render_turns(ChatTemplate(made(backend, "llama2")), asked, "assistant")
    assert error.value.code == "data.tools_unsupported"
    assert '"name": "add"' in render_turns(ChatTemplate(made(backend, "qwen2.5")), asked, "assistant").text


def test_a_tokenizer_without_the_tokens_is_refused(backend):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend), eos_token="</s>")
    row = find_template("phi_4")
    assert row is not None
    with pytest.raises(ModelError) as error:
        use_template(tokenizer, row)
    assert error.value.code == "model.template_tokens_missing"
    assert "<|im_sep|>" in str(error.value)


def test_a_vocabulary_names_its_format():
    assert template_for(["a", "<|im_start|>", "<|im_end|>"]) is find_template("chatml")
    assert template_for(["a", "<start_of_turn>", "<end_of_turn>"]) is find_template("gemma3")
    assert template_for(["a", "</s>"]) is None


def test_names_are_unique():
    names = [name for row in templates() for name in row.names]
    assert len(names) == len(set(names))
    assert len(templates()) >= 40


def test_the_reference_lists_every_template():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "chat-templates.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "templates_page.py"))
    assert page == script["HEAD"] + "\n".join(map(script["line"], templates())) + "\n"
