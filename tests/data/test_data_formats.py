"""Rows of every format become the conversation they mean, or an error that names the row."""

from __future__ import annotations

import json

import pytest

from halftune.core.errors import DataError
from halftune.data.formats import FORMATS, load_format
from halftune.data.formats.conversation import RowDropped, RowError
from halftune.data.pipeline import prepare
from halftune.data.templates.omitted_text import NO_TOOLS


def read(name, row):
    return load_format(name).read(row)


def pairs(conversation):
    return [(message["role"], message["content"]) for message in conversation.messages]


def test_every_format_is_named_as_in_the_config():
    assert {name: load_format(name).name for name in FORMATS} == {name: name for name in FORMATS}


def test_alpaca():
    row = {"instruction": "Solve the math problem.", "input": "3 + 4", "output": "The answer is 7."}
    assert pairs(read("alpaca", row)) == [("user", "Solve the math problem.\n3 + 4"), ("assistant", "The answer is 7.")]
    full = {**row, "input": "", "system": "Be brief.", "history": [["1 + 1", "2"]]}
    assert pairs(read("alpaca", full)) == [
        ("system", "Be brief."),
        ("user", "1 + 1"),
        ("assistant", "2"),
        ("user", "Solve the math problem."),
        ("assistant", "The answer is 7."),
    ]


@pytest.mark.parametrize("answer", ["", "  \n", None])
def test_an_empty_answer_is_dropped(answer):
    with pytest.raises(RowDropped, match="empty"):
        read("alpaca", {"instruction": "A?", "output": answer})
    with pytest.raises(RowDropped, match="empty"):
        read("prompt_completion", {"prompt": "A?", "completion": answer})


def test_sharegpt_with_tools_and_results():
    row = {
        "conversations": [
            {"from": "system", "value": "S"},
            {"from": "human", "value": "H"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": '{"y": 2}'},
            {"from": "gpt", "value": "G"},
        ],
        "tools": '[{"name": "f", "description": "d", "parameters": {}}]',
    }
    made = read("sharegpt", row)
    assert pairs(made) == [("system", "S"), ("user", "H"), ("assistant", ""), ("tool", '{"y": 2}'), ("assistant", "G")]
    assert made.messages[2]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert made.tools == [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


def test_openai_parts_reasoning_and_arguments_as_text():
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}]},
            {
                "role": "assistant",
                "content": [{"type": "reasoning", "value": "r"}, {"type": "tool_call", "value": '{"name": "f"}'}],
            },
            {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "q",
                "tool_calls": [{"id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"x": [1]}'}}],
            },
        ]
    }
    messages = read("messages", row).messages
    assert messages[0] == {"role": "user", "content": "ab"}
    assert messages[1]["reasoning_content"] == "r"
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert messages[2] == {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"}
    assert messages[3]["tool_calls"][0]["function"]["arguments"] == {"x": [1]}
    assert messages[3]["content"] == ""


def test_prompt_and_completion_as_messages_train_the_completion_only():
    prompt = [
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "B."},
        {"role": "user", "content": "C?"},
    ]
    made = read("prompt_completion", {"prompt": prompt, "completion": [{"role": "assistant", "content": "D."}]})
    assert made.train == (None, False, None, None)  # with train_on: all, the questions are trained too
    assert pairs(read("prompt_completion", {"prompt": prompt, "completion": "D."}))[-1] == ("assistant", "D.")


MALFORMED = [
    ("messages", {"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'"),
    ("messages", {"messages": [{"content": "x"}]}, "neither role nor from"),
    ("messages", {"messages": ["x"]}, "message 1: expected an object"),
    ("messages", {"messages": [{"role": "user", "content": 3}]}, "text or a list of parts"),
    ("messages", {"messages": [{"role": "user", "content": "x", "training": False}]}, "unknown key 'training'"),
    ("sharegpt", {"conversations": [{"from": "gpt", "value": "x", "Weights": 0}]}, "unknown key 'Weights'"),
    ("messages", {"messages": [{"role": "assistant", "content": "x", "loss": False}]}, "unknown key 'loss'"),
    ("messages", {"messages": [{"role": "assistant", "content": "x", "trainable": True}]}, "unknown key 'trainable'"),
    ("alpaca", {"instruction": "A?"}, "row without an answer"),
    ("alpaca", {"instruction": ["A"], "output": "B"}, "instruction: .*list"),
    ("alpaca", {"instruction": "A", "output": True}, "output: .*boolean"),
    ("alpaca", {"instruction": "A", "output": "B", "history": ["x"]}, "history: expected"),
    ("alpaca", {"instruction": "A", "output": "B", "history": 7}, "history: expected"),
    ("sharegpt", {"conversations": [{"from": "gpt", "value": "x"}], "tools": "[{]"}, "tools is not valid JSON"),
    ("sharegpt", {"conversations": [{"from": "function_call", "value": "{f}"}]}, "tool call is not valid JSON"),
    ("sharegpt", {"conversations": [{"from": "function_call", "value": "{}"}]}, "needs a name"),
    (
        "sharegpt",
        {"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": "{x"}'}]},
        "arguments of a tool call is not valid JSON",
    ),
]


@pytest.mark.parametrize(("name", "row", "message"), MALFORMED)
def test_malformed_rows_say_what_is_wrong(name, row, message):
    with pytest.raises(RowError, match=message):
        read(name, row)


def test_keys_of_a_message_that_nothing_reads_are_noted():
    message = {"role": "assistant", "content": "x", "seen": False, "mask": 1, "refusal": None, "value": "y"}
    (note,) = read("messages", {"messages": [message, {**message, "id": "7"}]}).notes
    assert note.endswith(": id, mask, seen, value")
    with pytest.raises(RowError) as caught:
        read("messages", {"messages": [{"role": "assistant", "content": "x", "training": False}]})
    assert caught.value.remedy.startswith("did you mean train?")
    read("messages", {"messages": [{"role": "assistant", "content": "x", "training": None}]})


def test_openais_earlier_function_call_is_a_tool_call():
    call = {"name": "f", "arguments": '{"x": 1}'}
    made = read("messages", {"messages": [{"role": "assistant", "content": None, "function_call": call}]})
    assert made.messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert made.notes == ()


def test_a_malformed_tool_call_names_file_and_row(tokenizer, make_config, write):
    good = {"conversations": [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "B."}]}
    bad = {"conversations": [*good["conversations"], {"from": "function_call", "value": '{"name": "f", "argum'}]}
    path = write(json.dumps([good, good, bad]), "tools.json")
    with pytest.raises(DataError, match=rf"{path} row 3: message 3: tool call is not valid JSON"):
        prepare(make_config(path), tokenizer)


def test_a_row_without_an_answer_is_named(tokenizer, make_config, write):
    path = write([{"instruction": "A?", "output": "B."}, {"instruction": "C?"}])
    with pytest.raises(DataError, match=rf"{path} line 2: row without an answer: it has no column 'output'"):
        prepare(make_config(path), tokenizer)


@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "x"}],
            "images": ["a.png"],
        },
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": "A?"}]},
        {"messages": []},
    ],
)
def test_what_cannot_be_trained_on_is_dropped_and_counted(row, tokenizer, make_config, write):
    good = {"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]}
    prepared = prepare(make_config(write([good, row, good])), tokenizer)
    assert len(prepared.train) == 2
    ((_, count),) = prepared.report.train[0].dropped.items()
    assert (count.count, count.rows) == (1, ["2"])


def test_nothing_left_is_an_error_with_the_reasons(tokenizer, make_config, write):
    path = write([{"instruction": "A?", "output": ""}] * 3)
    with pytest.raises(DataError, match=r"the answer is empty: 3 \(rows 1, 2, 3\)"):
        prepare(make_config(path), tokenizer)


@pytest.mark.parametrize(
    ("content", "more"), [("A?", {"audios": ["a.wav"]}), ([{"type": "audio", "path": "a.wav"}], {})]
)
def test_an_error_for_rows_with_media_in_a_run_of_texts_names_the_key(tokenizer, make_config, write, content, more):
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "B."}]
    with pytest.raises(DataError) as caught:
        prepare(make_config(write([{"messages": messages} | more])), tokenizer)
    assert "data.audio" in caught.value.remedy


def test_tools_that_a_template_does_not_show_are_named(make_tokenizer, make_config, write):
    row = {"prompt": "A?", "completion": "B.", "tools": [{"name": "f"}]}
    prepared = prepare(make_config(write([row])), make_tokenizer("llama3"))
    assert [note for note in prepared.report.train[0].notes if note == NO_TOOLS]
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
    rows = [row | {"conversations": [{"from": "human", "value": "A?"}, call]}]
    with pytest.raises(DataError, match="tool calls"):
        prepare(make_config(write(rows, "calls.jsonl")), make_tokenizer("llama3"))
