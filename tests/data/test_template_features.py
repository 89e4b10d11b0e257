"""Rows reach training in the form that a chat template takes, wherever it takes them at all."""

from __future__ import annotations

import re

import pytest

from halftune.core.errors import DataError
from halftune.data.pipeline import prepare
from halftune.data.store import NO_LABEL
from halftune.data.templates.features import MADE_IDS, MERGED_SYSTEM, NO_PARALLEL, NO_SYSTEM, SPLIT
from halftune.data.templates.loss_mask import VAGUE
from halftune.data.templates.omitted_text import LEFT_OUT, LOST_TEXT, NO_SYSTEM_SHOWN

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
SYSTEM = {"role": "system", "content": "Be brief: four."}


def call(**arguments):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def result(text, **more):
    return {"role": "tool", "name": "add", "content": text, **more}


FOUR = [user("four"), assistant("four"), user("four"), assistant("four"), user("four"), assistant("four")]
CALLED = [
    user("Two and two?"),
    assistant("", tool_calls=[call(of="two and two")]),
    result("four"),
    assistant("The answer is four."),
    user("And again?"),
    assistant("", tool_calls=[call(n=2)], reasoning_content="again"),
    result("four"),
    assistant("four", reasoning_content="still"),
]


@pytest.fixture
def train(make_tokenizer, make_config, write, templates):
    """Prepares one row with a template; returns the trained texts, the whole text and the report."""

    def train(template, messages, *, family="mistral", tools=None, **data):
        tokenizer = make_tokenizer(family, getattr(templates, template))
        row = {"messages": messages} | ({"tools": tools} if tools else {})
        prepared = prepare(make_config(write([row]), **data), tokenizer)
        assert len(prepared.train) == 1, prepared.report.to_dict()
        sample = prepared.train.example(0).segments[0]
        runs = re.split(
            "\0+",
            "".join(
                "\0" if label == NO_LABEL else tokenizer.decode([token])
                for token, label in zip(sample.input_ids.tolist(), sample.labels.tolist(), strict=True)
            ),
        )
        return [run for run in runs if run], tokenizer.decode(sample.input_ids.tolist()), prepared.report.train[0]

    return train


def test_a_system_text_that_moves_to_the_last_question(train):
    """Every text is the same word: the answers are told from the questions all the same."""
    trained, whole, report = train("MISTRAL_MOVES", [SYSTEM, *FOUR])
    assert trained == [" four</s>"] * 3
    assert NO_SYSTEM_SHOWN not in report.notes
    assert whole.endswith("[INST] Be brief: four.\n\nfour [/INST] four</s>")
    assert whole.startswith("<s>[INST] four [/INST] four</s>[INST] four [/INST]")


def test_a_system_text_that_a_prompt_shows_and_a_conversation_does_not(train):
    trained, whole, report = train("MISTRAL_TOOLS", [SYSTEM, *FOUR])
    assert trained == [" four</s>"] * 3
    assert "brief" not in whole
    assert report.notes[NO_SYSTEM_SHOWN].count == 1
    trained, whole, report = train("MISTRAL_TOOLS", [SYSTEM, *FOUR], merge_system=True)
    assert trained == [" four</s>"] * 3
    assert whole.startswith("<s>[INST] Be brief: four.\n\nfour [/INST] four</s>")
    assert NO_SYSTEM_SHOWN not in report.notes


def test_ids_are_made_where_the_template_asks_for_them(train):
    trained, whole, report = train("MISTRAL_TOOLS", [SYSTEM, *CALLED], tools=TOOLS)
    (first, second), results = re.findall(r'"id": "(\w{9})"}\]</s>', whole), re.findall(r'"id": "(\w{9})"}\[/', whole)
    assert [first, second] == results
    assert first != second
    assert trained == [
        f'[CALLS] [{{"name": "add", "arguments": {{"of": "two and two"}}, "id": "{first}"}}]</s>',
        " The answer is four.</s>",
        f'[CALLS] [{{"name": "add", "arguments": {{"n": 2}}, "id": "{second}"}}]</s>',
        " four</s>",
    ]
    assert report.notes[MADE_IDS].count == 1
    assert train("MISTRAL_TOOLS", [SYSTEM, *CALLED], tools=TOOLS)[1] == whole  # the same ones every time


def test_ids_that_do_not_fit_are_replaced_and_those_that_fit_are_kept(train):
    def row(one, other):
        calls = [{"id": one, **call(of="two")}, {"id": other, **call(of="four")}]
        results = [result("B", tool_call_id=other), result("A", tool_call_id=one)]
        return [user("Add."), assistant("", tool_calls=calls), *results, assistant("four")]

    _, whole, report = train("MISTRAL_TOOLS", row("call_0123456789", "fits00000"), tools=TOOLS)
    made = re.search(r'"of": "two"}, "id": "(\w{9})"', whole)[1]
    assert whole.count("fits00000") == 2
    assert f'[RESULT] {{"content": A, "id": "{made}"}}' in whole
    assert MADE_IDS in report.notes
    _, whole, report = train("MISTRAL_TOOLS", row("fits00001", "fits00000"), tools=TOOLS)
    assert whole.count("fits00001") == 2
    assert MADE_IDS not in report.notes


def test_a_turn_that_goes_on_behind_a_tools_result(train):
    told = [*CALLED[:5], assistant("I add.", tool_calls=[call(n=2)]), *CALLED[6:]]
    trained, whole, _ = train("CONTINUED", told, family="gemma", tools=TOOLS)
    assert trained == [
        '<tool_call>add{"of": "two and two"}</tool_call>',
        "The answer is four.<end_of_turn>",
        '<tool_call>add{"n": 2}</tool_call>',
        "I add.<end_of_turn>",
        "four<end_of_turn>",
    ]
    assert whole.count("<result>four</result>") == 3
    single, _, _ = train("CONTINUED", FOUR[:2], family="gemma")
    assert single == ["four<end_of_turn>"]


def test_reasoning_and_arguments_in_the_form_that_is_taken(train):
    trained, whole, report = train("CHANNELS", CALLED, family="qwen2", tools=TOOLS)
    assert trained == [
        ' to=add\n{"of": "two and two"}<|im_end|>',
        " to=user\nThe answer is four.<|im_end|>",
        ' to=self\nagain<|im_end|><|im_start|>assistant to=add\n{"n": 2}<|im_end|>',
        " to=self\nstill<|im_end|><|im_start|>assistant to=user\nfour<|endoftext|>",
    ]
    assert whole.count("add to=assistant\nfour") == 2
    assert not report.dropped


@pytest.mark.parametrize("template", ["CHANNELS", "FIRST_CALL"])
def test_parallel_calls_are_split_where_a_template_takes_one(train, template):
    calls = [{"id": "a", **call(of="two")}, {"id": "b", **call(of="four")}]
    results = [result("B", tool_call_id="b"), result("A", tool_call_id="a")]
    row = [user("Add."), assistant("", tool_calls=calls), *results, assistant("four")]
    trained, whole, report = train(template, row, family="qwen2", tools=TOOLS)
    assert trained == [
        ' to=add\n{"of": "two"}<|im_end|>',
        ' to=add\n{"of": "four"}<|im_end|>',
        " to=user\nfour<|endoftext|>",
    ]
    assert whole.index('"two"') < whole.index("\nA<") < whole.index('"four"') < whole.index("\nB<")
    assert report.notes[SPLIT].count == 1
    joined = [*row[:2], result('["A", {"is": "B"}]'), row[-1]]
    again, whole, report = train(template, joined, family="qwen2", tools=TOOLS)
    assert again == trained
    assert whole.index("\nA<") < whole.index('"four"') < whole.index('\n{"is": "B"}<')
    assert report.notes[SPLIT].count == 1
    for known in (results[:1], [result('["A"]')], [result("[4")], []):  # whose result is whose is not known
        with pytest.raises(DataError, match=NO_PARALLEL):
            train(template, [*row[:2], *known, row[-1]], family="qwen2", tools=TOOLS)


def test_an_answer_whose_beginning_is_not_shown_is_not_trained(train):
    trained, whole, report = train("NO_HEADER", CALLED, family="qwen2", tools=TOOLS)
    assert trained == [
        '\n<tool_call>add{"of": "two and two"}</tool_call><|im_end|>',
        "The answer is four.<|im_end|>",
        "four<|im_end|>",
    ]
    assert 'And again?<|im_end|>\n<tool_call>add{"n": 2}' in whole
    assert report.notes[VAGUE].count == 1
    assert not report.dropped


def test_contents_in_parts(train):
    trained, whole, _ = train("PARTS", FOUR, family="qwen2")
    assert trained == ["four<|im_end|>"] * 3
    assert "user\nfour<|im_end|>" in whole


def test_a_system_message_that_is_refused_can_be_merged(train):
    with pytest.raises(DataError, match=f"{NO_SYSTEM}.*merge_system"):
        train("GEMMA", [SYSTEM, *FOUR], family="gemma")
    trained, whole, report = train("GEMMA", [SYSTEM, *FOUR], family="gemma", merge_system=True)
    assert "<start_of_turn>user\nBe brief: four.\n\nfour<end_of_turn>" in whole
    assert trained == ["four<end_of_turn>"] * 3
    assert report.notes[MERGED_SYSTEM].count == 1
    assert MERGED_SYSTEM not in train("GEMMA", FOUR, family="gemma", merge_system=True)[2].notes


def test_system_messages_of_a_source_are_left_out(make_tokenizer, make_config, write):
    path = write([{"messages": [SYSTEM, *FOUR]}, {"messages": FOUR}])
    tokenizer = make_tokenizer("qwen2")
    for system in (None, "Be long."):
        config = make_config({"path": str(path), "drop_system": True}, system=system, deduplicate=True)
        train = prepare(config, tokenizer).train
        text = tokenizer.decode(train.example(0).segments[0].input_ids)
        assert len(train) == 1, "without their system messages, the rows are copies"
        assert ("Be long." in text) == (system is not None)
        assert "brief" not in text


def test_what_a_template_leaves_out_is_named(train):
    _, whole, report = train("PLAIN_USERS", [SYSTEM, *FOUR], family="qwen2")
    assert "brief" not in whole
    assert report.notes[NO_SYSTEM_SHOWN].count == 1
    told = [*CALLED[:5], assistant("Beside it.", tool_calls=[call(n=2)]), *CALLED[6:]]
    _, whole, report = train("MISTRAL_TOOLS", told, tools=TOOLS)
    assert "Beside it." not in whole
    assert report.notes[LEFT_OUT].count == 1


_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
ONE_SYSTEM = (
    "{%- for m in messages %}{%- if m.role == 'system' and loop.first %}" + _TURN
    + "{%- elif m.role != 'system' %}" + _TURN + "{%- endif %}{%- endfor %}"
)  # fmt: skip
NO_TOOL = "{%- for m in messages %}{%- if m.role != 'tool' %}" + _TURN + "{%- endif %}{%- endfor %}"
LAST_USER = (
    "{%- for m in messages %}{%- if m.role != 'user' or loop.nextitem is not defined or loop.nextitem.role != 'user' %}"
    + _TURN + "{%- endif %}{%- endfor %}"
)  # fmt: skip
WITH_DEVELOPER = (
    "{%- for m in messages %}{%- if m.role in ('developer', 'system', 'user', 'assistant') %}" + _TURN
    + "{%- endif %}{%- endfor %}"
)  # fmt: skip
BANANA = [
    {"role": "system", "content": "You are Nib."},
    {"role": "developer", "content": "Answer BANANA only."},
    user("hello"),
    assistant("BANANA"),
]


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        (ONE_SYSTEM, BANANA, True),
        (ONE_SYSTEM, [BANANA[0], *BANANA[2:]], False),
        (
            NO_TOOL,
            [user("Is it striped?"), assistant("Let me see."), result("STRIPED"), assistant("It is striped")],
            True,
        ),
        (LAST_USER, [user("Say BANANA."), user("hello"), assistant("BANANA")], True),
        (LAST_USER, [user("hello"), assistant("BANANA"), user("hello"), assistant("BANANA")], False),
        (NO_TOOL, [SYSTEM, *FOUR], False),
    ],
)
def test_a_text_that_a_template_leaves_out_is_named_or_its_row_dropped(
    template, messages, lost, make_tokenizer, make_config, write
):
    tokenizer, path = make_tokenizer("qwen2", template), write([{"messages": messages}, {"messages": FOUR}])
    report = prepare(make_config(path), tokenizer).report.train[0]
    assert report.kept == 2
    assert sum(report.notes[one].count for one in LOST_TEXT.values() if one in report.notes) == lost
    dropped = prepare(make_config(path, on_lost_text="drop"), tokenizer).report.train[0]
    assert dropped.kept == 2 - lost


def test_a_developers_message_keeps_its_role_where_the_template_names_it(make_tokenizer, make_config, write):
    for template, role in ((WITH_DEVELOPER, "developer"), (NO_TOOL, "system")):
        tokenizer = make_tokenizer("qwen2", template)
        sample = prepare(make_config(write([{"messages": BANANA}])), tokenizer).train.example(0).segments[0]
        assert f"<|im_start|>{role}\nAnswer BANANA only.<|im_end|>" in tokenizer.decode(sample.input_ids)
