"""Sources with a prompt in place of the chat template, and the first rows of a source."""

from __future__ import annotations

import pytest
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from halftune.core.errors import DataError
from halftune.data.order.split import choose_rows
from halftune.data.pipeline import prepare

ROWS = [
    {"instruction": "Add {input}.", "input": "2 and 2", "output": "four"},
    {"instruction": "Say four.", "input": "", "output": "The answer is four.\n"},
]
# As axolotl's AlpacaPrompter builds it (prompters.py, prompt style "instruct").
WITH = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd {input}.\n\n### Input:\n2 and 2\n\n### Response:\n"
)
WITHOUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nSay four.\n\n### Response:\n"
)


def samples(split):
    return [split.example(index).segments[0] for index in range(len(split))]


def sentencepiece(tokenizer):
    """Mark the start of every text, as the tokenizer of Llama 2 does, and begin texts with BOS."""
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Replace("\n", "Ċ")
    backend.pre_tokenizer = pre_tokenizers.Metaspace("Ġ", prepend_scheme="first")
    backend.decoder = decoders.Metaspace("Ġ")
    ids = [("<s>", tokenizer.bos_token_id)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    return tokenizer


@pytest.mark.parametrize("family", ["qwen2", "mistral", "spm"])
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_alpaca_prompt_has_the_tokens_and_labels_of_axolotl(make_tokenizer, make_config, write, family, train_on):
    tokenizer = sentencepiece(make_tokenizer("mistral")) if family == "spm" else make_tokenizer(family)
    tokenizer.chat_template = None  # none is needed
    method = {"type": "sft", "train_on": train_on}
    source = {"path": write(ROWS), "prompt": "alpaca"}
    found = samples(prepare(make_config([source], method=method), tokenizer).train)
    for sample, prompt, row in zip(found, (WITH, WITHOUT), ROWS, strict=True):
        before = tokenizer(prompt)["input_ids"]
        answer = tokenizer(row["output"], add_special_tokens=False)["input_ids"]
        assert sample.input_ids.tolist() == [*before, *answer, tokenizer.eos_token_id]
        labels = [train_on == "all"] * len(before) + [True] * (len(answer) + 1)
        assert sample.loss_mask.tolist()[1:] == labels[1:]  # nothing predicts the first token


def test_own_prompt_and_columns(make_tokenizer, make_config, write):
    tokenizer = make_tokenizer("mistral")
    path = write([{"q": "Two and two?", "a": "<s>four"}])
    columns = {"instruction": "q", "output": "a"}
    source = {"path": path, "prompt": "<s>Q: {instruction}\nA:", "columns": columns}
    (sample,) = samples(prepare(make_config([source]), tokenizer).train)
    assert sample.input_ids[0] == tokenizer.bos_token_id  # of the prompt; that of the row is plain text
    assert sample.input_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == "<s>four</s>"


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_long_rows(make_tokenizer, make_config, write, overlong):
    path = write([*ROWS, {"instruction": "Say it.", "output": "four " * 400}])
    config = make_config([{"path": path, "prompt": "alpaca"}], overlong=overlong, max_length=320)
    split = prepare(config, make_tokenizer()).train
    assert len(split) == (3 if overlong == "truncate" else 2)
    assert max(len(sample.input_ids) for sample in samples(split)) <= 320


@pytest.mark.parametrize(
    ("source", "method", "code"),
    [
        ({"prompt": "alpacca"}, "sft", "data.unknown_prompt"),
        ({"prompt": "alpaca", "format": "text"}, "sft", "data.unknown_prompt"),
        ({"prompt": "alpaca"}, "dpo", "data.unknown_prompt"),
        ({"prompt": "alpaca", "columns": {"output": "input"}}, "sft", None),
    ],
)
def test_prompts_that_do_not_fit(make_tokenizer, make_config, write, source, method, code):
    config = make_config([{"path": write(ROWS[:1]), **source}], method=method)
    if code is None:
        assert len(prepare(config, make_tokenizer()).train) == 1
        return
    with pytest.raises(DataError) as raised:
        prepare(config, make_tokenizer())
    assert raised.value.code == code


def test_missing_column(make_tokenizer, make_config, write):
    with pytest.raises(DataError) as raised:
        prepare(make_config([{"path": write([{"text": "x"}]), "prompt": "alpaca"}]), make_tokenizer())
    assert raised.value.code == "data.unknown_format"


def test_first_rows():
    assert choose_rows(10, 3, seed=1, first=True).tolist() == [0, 1, 2]
    assert choose_rows(10, 30, seed=1, first=True).tolist() == list(range(10))
    assert choose_rows(10, 3, seed=1).tolist() != [0, 1, 2]
