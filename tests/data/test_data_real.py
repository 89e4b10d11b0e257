"""The real sets, as people have them."""

from __future__ import annotations

import json
from functools import cache

import pytest

from halftune.core.errors import DataError
from halftune.data.pipeline import prepare
from halftune.data.store import NO_LABEL

KEPT = [
    ("alpaca_en_demo.json", "qwen2", 999, 999),
    ("alpaca_zh_demo.json", "llama3", 1000, 1000),
    ("identity.json", "mistral", 91, 91),
    ("glaive_toolcall_en_demo.json", "qwen2", 300, 300),
    ("reason_tool_use_demo_50.jsonl", "qwen2", 50, 50),
]


@pytest.fixture(scope="module")
def conversations(shared_data, make_tokenizer, make_config):
    """``conversations(file, family)`` → (tokenizer, prepared), made once."""

    @cache
    def make(name: str, family: str):
        tokenizer = make_tokenizer(family)
        return tokenizer, prepare(make_config(str(shared_data / name), max_length=1_000_000), tokenizer)

    return make


@pytest.mark.parametrize(("name", "family", "rows", "kept"), KEPT)
def test_conversations(name, family, rows, kept, conversations):
    tokenizer, prepared = conversations(name, family)
    source = prepared.report.train[0]
    assert (source.rows, source.kept) == (rows, kept)
    assert not source.truncated
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    for index in range(len(prepared.train)):
        labels = prepared.train.example(index).segments[0].labels
        assert labels[labels != NO_LABEL][-1] in ends


def test_alpaca_is_the_templates_rendering(shared_data, conversations):
    path = shared_data / "alpaca_en_demo.json"
    tokenizer, prepared = conversations(path.name, "qwen2")
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert len(rows) == len(prepared.train)
    for index, row in list(enumerate(rows))[::4]:
        question = f"{row['instruction']}\n{row['input']}" if row["input"] else row["instruction"]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
        sample = prepared.train.example(index).segments[0]
        whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
        assert sample.input_ids.tolist() == whole
        newline = whole[-1:]
        assert sample.labels.tolist() == [NO_LABEL] * len(prompt) + whole[len(prompt) : -1] + [NO_LABEL] * len(newline)


def test_tool_calls_are_trained_and_results_are_not(conversations):
    tokenizer, prepared = conversations("glaive_toolcall_en_demo.json", "qwen2")
    sample = prepared.train.example(0).segments[0]
    trained = tokenizer.decode(sample.labels[sample.labels != NO_LABEL].tolist())
    assert (
        '<tool_call>\n{"name": "search_recipes", "arguments": {"ingredients": ["chicken", "bell peppers", "rice"]}}'
        in trained
    )
    assert "Cut the chicken into small pieces. Slice the bell peppers. Cook the rice." in trained  # the answer says it
    assert '{"recipes":' not in trained
    assert trained.count("<|im_end|>") == 4


def test_gsm8k_is_read_by_its_own_names(shared_data, tokenizer, make_config):
    prepared = prepare(make_config(str(shared_data / "gsm8k" / "test.jsonl")), tokenizer)
    assert len(prepared.train) == 1319
    assert prepared.report.train[0].columns == {"prompt": "question", "completion": "answer"}


@pytest.mark.parametrize(("name", "documents"), [("c4_demo.jsonl", 300), ("wiki_demo.txt", 30)])
def test_documents(name, documents, shared_data, tokenizer, make_config):
    prepared = prepare(make_config(str(shared_data / name), method="pretrain"), tokenizer)
    source = prepared.report.train[0]
    assert (source.format, source.kept) == ("text", documents)
    ends = sum(
        prepared.train.example(index).segments[0].input_ids.tolist().count(tokenizer.eos_token_id)
        for index in range(len(prepared.train))
    )
    assert ends == documents


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dpo_en_demo.json", "row without an answer"),
        ("mllm_demo.json", "row with images"),
        ("mllm_audio_demo.json", "row with audios"),
        ("c4_demo.jsonl", r"set method: \{type: pretrain\}"),
    ],
)
def test_what_cannot_be_trained_says_why(name, message, shared_data, tokenizer, make_config):
    with pytest.raises(DataError, match=message):
        prepare(make_config(str(shared_data / name)), tokenizer)


def test_rated_answers_are_refused(shared_data, tokenizer, make_config):
    with pytest.raises(DataError, match=r"kto_en_demo\.json: .*column label"):
        prepare(make_config(str(shared_data / "kto_en_demo.json")), tokenizer)
