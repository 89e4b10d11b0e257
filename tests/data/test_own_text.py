"""``labels: text`` against the token differences that axolotl's ``chat_template`` strategy finds its labels by."""

from __future__ import annotations

import pytest

from halftune.config.chat_templates import find_template
from halftune.data.pipeline import prepare
from halftune.data.store import NO_LABEL
from halftune.model.tokenizer.named_templates import use_template

ONE = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": " The answer is four. "}]
TWO = [
    {"role": "user", "content": "x"},
    *ONE[1:],
    {"role": "user", "content": "And in German?"},
    {"role": "assistant", "content": "Zwei und zwei: vier"},
]
THOUGHT = [*ONE[:1], {**ONE[1], "reasoning_content": "Two and two, so four."}]
CALL = [
    *ONE[:1],
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
        "name": "add", "arguments": {"a": 2, "b": 2}}}]},
    {"role": "tool", "name": "add", "content": "4"},
    {"role": "assistant", "content": "four"},
]  # fmt: skip

# A channel for thoughts and one for answers, and another end after the last turn, as GPT-OSS has.
CHANNELS = """
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|im_start|>user<|fim_middle|>' + message.content + '<|im_end|>' }}
    {%- else %}
        {%- if message.thinking %}
            {{- '<|im_start|>assistant<|repo_name|>analysis<|fim_middle|>' + message.thinking + '<|im_end|>' }}
        {%- endif %}
        {{- '<|im_start|>assistant<|repo_name|>final<|fim_middle|>' + message.content }}
        {{- '<|endoftext|>' if loop.last else '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}
"""


def ids_of(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]


def expected_labels(tokenizer, messages, ends):
    """Labels where an answer differs from a dummy in its place, and on a close end-of-turn token."""
    ids = ids_of(tokenizer, messages)
    labels, wanted = [NO_LABEL] * len(ids), [tokenizer.convert_tokens_to_ids(one) for one in ends]
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        dummy = ids_of(tokenizer, [*messages[:index], {"role": "assistant", "content": "[[dummy_message]]"}])
        full = ids_of(tokenizer, messages[: index + 1])
        pairs = list(zip(dummy, full, strict=False))
        start = next(place for place, (one, other) in enumerate(pairs) if one != other)
        backwards = zip(reversed(dummy), reversed(full), strict=False)
        end = len(full) - next(place for place, (one, other) in enumerate(backwards) if one != other)
        labels[start:end] = ids[start:end]
        closing = next((place for place in range(end, len(ids)) if ids[place] in wanted), end + 9)
        if closing - end <= 3:
            labels[closing] = ids[closing]
    return labels


@pytest.mark.parametrize(
    ("family", "messages"),
    [(family, messages) for family in ("qwen2", "llama3", "mistral", "gemma", "generation") for messages in (ONE, TWO)]
    + [("qwen3", ONE), ("qwen3", THOUGHT), ("qwen2", CALL)],
)
@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
def test_labels_are_those_of_the_difference(family, messages, eos, make_tokenizer, make_config, write):
    tokenizer = make_tokenizer(family)
    tokenizer.eos_token = eos
    method = {"type": "sft", "labels": "text", "label_ends": ["<|eot_id|>", "<nowhere>"]}
    prepared = prepare(make_config(write([{"messages": messages}]), method=method), tokenizer)
    sample = prepared.train.example(0).segments[0]
    expected = expected_labels(tokenizer, messages, [eos, "<|eot_id|>"])
    assert any(label != NO_LABEL for label in expected)
    assert sample.input_ids.tolist() == ids_of(tokenizer, messages)
    assert sample.labels.tolist() == expected


@pytest.mark.parametrize("ends", [[], ["<|im_end|>"]])
def test_channels(ends, make_tokenizer, make_config, write):
    tokenizer = make_tokenizer(template=CHANNELS)
    tokenizer.eos_token = "<|endoftext|>"
    for messages in (ONE, TWO, [*ONE[:1], {**ONE[1], "thinking": "Two and two, so four."}]):
        method = {"type": "sft", "labels": "text", "label_ends": ends}
        prepared = prepare(make_config(write([{"messages": messages}]), method=method), tokenizer)
        sample = prepared.train.example(0).segments[0]
        assert sample.labels.tolist() == expected_labels(tokenizer, messages, ["<|endoftext|>", *ends])


def test_an_empty_thought_has_no_label(make_tokenizer, make_config, write):
    tokenizer = make_tokenizer("qwen3")
    path = write([{"messages": TWO}])
    texts = {}
    for labels in ("turn", "text"):
        prepared = prepare(make_config(path, method={"type": "sft", "labels": labels}), tokenizer)
        sample = prepared.train.example(0).segments[0]
        texts[labels] = tokenizer.decode(sample.input_ids[sample.labels != NO_LABEL])
    whole = " The answer is four. <|im_end|><think>\n\n</think>\n\nZwei und zwei: vier<|im_end|>"
    assert texts == {"turn": whole, "text": whole.replace("<think>\n\n</think>\n\n", "")}


def test_an_untrained_turn_stays_so(tokenizer, make_config, write):
    messages = [*TWO[:1], {**TWO[1], "train": False}, *TWO[2:]]
    prepared = prepare(
        make_config(write([{"messages": messages}]), method={"type": "sft", "labels": "text"}), tokenizer
    )
    sample = prepared.train.example(0).segments[0]
    assert tokenizer.decode(sample.input_ids[sample.labels != NO_LABEL]) == "Zwei und zwei: vier<|im_end|>"


def test_a_named_template_leaves_eos_to_the_checkpoint(make_tokenizer, make_config, write):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    use_template(tokenizer, find_template("chatml"))
    path = write([{"messages": ONE}])
    for ends, end in (([], ""), (["<|im_end|>"], "<|im_end|>")):
        method = {"type": "sft", "labels": "text", "label_ends": ends}
        sample = prepare(make_config(path, method=method), tokenizer).train.example(0).segments[0]
        assert tokenizer.decode(sample.input_ids[sample.labels != NO_LABEL]) == f" The answer is four. {end}"
