"""No key of a row is lost in silence: each value is read, refused, noted, or empty.

The table has every optional key of every form of row with every type of JSON. The template writes all that a message
can hold, so that what is read stands in the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from halftune.config.sections.data import SourceSection
from halftune.config.sections.method import RecordName
from halftune.core.errors import DataError
from halftune.data.encode.prompts import PromptTokenizer
from halftune.data.encode.settings import Settings
from halftune.data.encode.tokenize import Outcome, RowTokenizer
from halftune.data.formats import load_format
from halftune.data.formats.conversation import BadRow, RowError
from halftune.data.formats.detect import detect
from halftune.data.formats.tool_calls import calls

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.name %}[{{ m.name }}]{% endif %}{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}{{ call.id or '' }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Row = dict[str, Any]
EMPTY = (None, "", [], {})
VALUES = {
    "null": None,
    "true": True,
    "false": False,
    "zero": 0,
    "integer": 907,
    "float": 2.75,
    "text": "Zqtext",
    "no text": "",
    "empty list": [],
    "empty object": {},
    "texts": ["Zqone", "Zqtwo"],
    "parts": [{"type": "text", "text": "Zqpart"}],
    "object": {"zq": "Zqvalue"},
}
USER = {"role": "user", "content": "A?"}
CALL = {"name": "f", "arguments": {"x": 1}}
MESSAGE_KEYS = (
    *("reasoning_content", "reasoning", "thinking", "tool_calls", "function_call", "name", "tool_call_id"),
    *("extra", "contents", "train", "weight"),
)
CALL_KEYS = ("parameters", "params", "args", "kwargs", "input", "id", "extra", "argument", "city")


def answer(**keys: Any) -> Row:
    return {"role": "assistant", "content": "B.", **keys}


def messages(*found: Any) -> Row:
    return {"messages": [USER, *found]}


def calling(**keys: Any) -> Row:
    return {"role": "assistant", "content": "", "tool_calls": [{"name": "f", **keys}]}


def sharegpt(sender: str, value: Any, **keys: Any) -> Row:
    return {"conversations": [{"from": "human", "value": "A?"}, {"from": sender, "value": value, **keys}]}


PREFERENCE = {"prompt": "A?", "chosen": "B.", "rejected": "C."}
RATED = {"label": True, "prompt": "A?", "completion": "B."}
# a form of row, its kind of record, its optional keys, and the row with some of them
FORMS: dict[str, tuple[RecordName, tuple[str, ...], Callable[..., Row]]] = {
    "messages: answer": ("conversation", MESSAGE_KEYS, lambda **keys: messages(answer(**keys))),
    "messages: question": (
        "conversation",
        MESSAGE_KEYS,
        lambda **keys: {"messages": [{**USER, **keys}, answer()]},
    ),
    "messages: result": (
        "conversation",
        MESSAGE_KEYS,
        lambda **keys: messages(calling(), {"role": "tool", "content": "R.", **keys}, answer()),
    ),
    "messages: row": ("conversation", ("system", "tools"), lambda **keys: {**messages(answer()), **keys}),
    "messages: part": (
        "conversation",
        ("value", "extra", "train"),
        lambda **keys: messages(answer(content=[{"type": "text", "text": "B.", **keys}])),
    ),
    "messages: reasoning part": (
        "conversation",
        ("thinking", "value", "extra"),
        lambda **keys: messages(answer(content=[{"type": "thinking", "text": "T.", **keys}])),
    ),
    "messages: call": ("conversation", CALL_KEYS, lambda **keys: messages(calling(**keys))),
    "messages: function": (
        "conversation",
        tuple(key for key in CALL_KEYS if key != "id"),
        lambda **keys: messages(answer(tool_calls=[{"type": "function", "function": {"name": "f", **keys}}])),
    ),
    "messages: around a function": (
        "conversation",
        ("arguments", "parameters", "extra", "id"),
        lambda **keys: messages(answer(tool_calls=[{"function": CALL, **keys}])),
    ),
    "sharegpt: answer": ("conversation", MESSAGE_KEYS, lambda **keys: sharegpt("gpt", "B.", **keys)),
    "sharegpt: call turn": (
        "conversation",
        MESSAGE_KEYS,
        lambda **keys: sharegpt("function_call", json.dumps(CALL), **keys),
    ),
    "sharegpt: call": (
        "conversation",
        CALL_KEYS,
        lambda **keys: sharegpt("function_call", json.dumps({"name": "f", **keys})),
    ),
    "sharegpt: row": ("conversation", ("system", "tools"), lambda **keys: {**sharegpt("gpt", "B."), **keys}),
    "alpaca": (
        "conversation",
        ("input", "system", "history", "tools"),
        lambda **keys: {"instruction": "A?", "output": "B.", **keys},
    ),
    "completion": (
        "conversation",
        ("system", "tools"),
        lambda **keys: {"prompt": "A?", "completion": "B.", **keys},
    ),
    "completion: lists": (
        "conversation",
        ("system", "tools"),
        lambda **keys: {"prompt": [USER], "completion": [answer()], **keys},
    ),
    "completion: prompt": (
        "conversation",
        ("prompt",),
        lambda **keys: {"prompt": None, "completion": [answer()], **keys},
    ),
    "completion: answer": (
        "conversation",
        MESSAGE_KEYS,
        lambda **keys: {"prompt": "A?", "completion": [answer(**keys)]},
    ),
    "pair": ("preference", ("system", "tools", "messages", "conversations"), lambda **keys: {**PREFERENCE, **keys}),
    "pair: answer": ("preference", MESSAGE_KEYS, lambda **keys: {**PREFERENCE, "chosen": [answer(**keys)]}),
    "pair: conversations": (
        "preference",
        ("system", "prompt", "messages"),
        lambda **keys: {"chosen": [USER, answer()], "rejected": [USER, answer(content="C.")], **keys},
    ),
    "rated": (
        "rated",
        ("system", "tools", "messages", "conversations", "output", "input"),
        lambda **keys: {**RATED, **keys},
    ),
    "rated: answer": ("rated", MESSAGE_KEYS, lambda **keys: {"label": True, **messages(answer(**keys))}),
    "prompt": ("prompt", ("system", "tools"), lambda **keys: {"prompt": "A?", **keys}),
    "prompt: question": ("prompt", MESSAGE_KEYS, lambda **keys: {"prompt": [{**USER, **keys}]}),
}  # fmt: skip


def leaves(value: Any) -> Iterator[str]:
    """The texts and numbers of a value, except types of parts."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from () if key == "type" else leaves(one)
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one)
    elif value is not None:
        yield str(value)


@pytest.fixture
def tokenised(make_tokenizer: Callable[..., Any]) -> Callable[[Row, RecordName], tuple[Outcome, list[str]]]:
    """The outcome of a row, and the texts of its segments."""
    tokenizer = make_tokenizer(template=TEMPLATE)
    known: dict[Any, RowTokenizer] = {}

    def made(row: Row, record: RecordName) -> tuple[Outcome, list[str]]:
        reading = detect([row], SourceSection(path="x"), "x", (record,))
        key = (reading.format.name, tuple(reading.columns))
        if key not in known:
            kind = PromptTokenizer if record == "prompt" else RowTokenizer
            known[key] = kind(tokenizer, reading, Settings("assistant", 4096, "truncate", None))
        (outcome,) = known[key].tokenize([row])
        segments = [one for example in outcome.examples for one in example.segments]
        return outcome, [tokenizer.decode(one.input_ids) for one in segments]

    return made


def fate(value: Any, plain: tuple[Outcome, list[str]], read: Callable[[], tuple[Outcome, list[str]]], key: str) -> str:
    """What becomes of a value: ``refused``, ``dropped``, ``noted``, ``read``, ``absent`` or ``lost``."""
    try:
        outcome, texts = read()
    except BadRow as error:
        return "refused" if error.code == "data.malformed_row" else error.code
    if outcome.dropped:
        return "dropped"
    if [note for note in outcome.notes if key in note.replace(",", " ").split()]:
        return "noted"
    if value in EMPTY and not isinstance(value, bool | int):
        return "absent" if texts == plain[1] else "changed"
    return "read" if texts != plain[1] and all(one in texts[0] for one in leaves(value)) else "lost"


@pytest.mark.parametrize("form", FORMS)
def test_every_key_with_every_type_is_read_refused_or_empty(form: str, tokenised: Callable[..., Any]) -> None:
    record, keys, make = FORMS[form]
    plain = tokenised(make(), record)
    found = {
        (key, name): fate(value, plain, partial(tokenised, make(**{key: value}), record), key)
        for key in keys
        for name, value in VALUES.items()
    }
    flags = {("train", "true"), ("train", "false"), ("weight", "zero")}  # they change labels
    fates = {place: one for place, one in found.items() if place not in flags or "part" in form}
    silent = {
        place: one for place, one in fates.items() if one not in ("read", "refused", "noted", "absent", "dropped")
    }
    assert not silent
    assert {one for (_, name), one in fates.items() if name in ("null", "no text", "empty list")} <= {
        "absent",
        "refused",
    }


@pytest.mark.parametrize("key", ["arguments", "parameters", "params", "args", "kwargs", "input"])
@pytest.mark.parametrize("place", ["object", "text", "function", "turn"])
def test_arguments_are_read_under_each_of_their_names(key: str, place: str) -> None:
    given = {"name": "f", key: {"city": "Bern"}}
    value = {
        "object": given,
        "text": json.dumps(given),
        "function": {"type": "function", "function": given},
        "turn": [given],
    }
    (call,) = calls(value[place], "message 1")
    assert call == {"type": "function", "function": {"name": "f", "arguments": {"city": "Bern"}}}


def test_harmless_keys_of_calls_and_parts_are_no_error() -> None:
    (call,) = calls({"id": 7, "index": 0, "type": "tool_call", "status": "done", "name": "f", "args": {}}, "message 1")
    assert call == {"id": "7", "type": "function", "function": {"name": "f", "arguments": {}}}
    part = {"type": "thinking", "thinking": "T.", "signature": "abc", "cache_control": {"type": "ephemeral"}}
    made = load_format("messages").read(
        messages(answer(content=[part, {"type": "text", "text": "B.", "annotations": [1]}]))
    )
    assert (made.messages[1]["reasoning_content"], made.messages[1]["content"], made.notes) == ("T.", "B.", ())


@pytest.mark.parametrize(
    ("key", "guess"), [("argument", "arguments"), ("parameter", "parameters"), ("arg", "args"), ("inputs", "input")]
)
def test_a_misspelt_key_of_a_call_is_refused_with_a_guess(key: str, guess: str) -> None:
    with pytest.raises(RowError) as error:
        calls({"name": "f", key: {"x": 1}}, "message 1")
    assert error.value.remedy == f"did you mean {guess}?"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "text": "B."},
        {"role": "assistant", "value": "B."},
        {"from": "gpt", "content": "B."},
        {"role": "assistant", "Content": "B."},
        {"role": "assistant", "content": "B.", "tool_call": [CALL]},
        {"role": "assistant", "content": "B.", "train": False, "weight": 1},
        {"role": "assistant", "content": "B.", "reasoning": "one", "thinking": "two"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "function_call": {"name": "g"}},
        {"role": "assistant", "content": [{"type": "reasoning", "text": "one"}], "thinking": "two"},
        {"role": "assistant", "content": "B.", "reasoning": [{"type": "tool_call", "value": CALL}]},
    ],
)
def test_a_message_that_says_two_things_or_hides_its_text_is_refused(message: Row) -> None:
    with pytest.raises(RowError):
        load_format("messages").read(messages(message))


@pytest.mark.parametrize(
    ("content", "reasoning", "expected"),
    [
        ("<think>\nT.\n</think>\n\nB.", "T.", ("<think>\nT.\n</think>\n\nB.", None)),
        ("T.</think>B.", "T.\n", ("T.</think>B.", None)),
        ("[THINK]T.[/THINK]B.", "T.", ("[THINK]T.[/THINK]B.", None)),
        ("B.", "T.", ("B.", "T.")),
        ("<think>\nU.\n</think>\n\nB.", "T.", None),
        ("Write </think> last.", "T.", ("Write </think> last.", "T.")),
        ("Sure. <think>U.</think>B.", "T.", None),
        ("<think>U.", "T.", None),
        ("<thinking>U.</thinking>B.", "T.", None),
        ("<think>U.</think>B.", "", ("<think>U.</think>B.", None)),
    ],
)
def test_reasoning_in_the_text_and_beside_it_is_one_block(content: str, reasoning: str, expected: Any) -> None:
    row = messages(answer(content=content, reasoning_content=reasoning))
    if expected is None:
        with pytest.raises(RowError):
            load_format("messages").read(row)
    else:
        made = load_format("messages").read(row).messages[1]
        assert (made["content"], made.get("reasoning_content")) == expected


THINKING, TEXT = ({"type": kind, kind: kind} for kind in ("thinking", "text"))
PART_OF_CALL = {"type": "tool_call", "tool_call": CALL}


@pytest.mark.parametrize(
    ("parts", "refused"),
    [
        ([THINKING, THINKING, TEXT, TEXT, PART_OF_CALL, PART_OF_CALL], False),
        ([{"type": "text", "text": "\n"}, THINKING, TEXT, PART_OF_CALL, {"type": "text", "text": ""}], False),
        ([TEXT, THINKING, TEXT], True),
        ([PART_OF_CALL, TEXT], True),
        ([THINKING, PART_OF_CALL, THINKING], True),
    ],
)
def test_parts_in_an_order_that_templates_change_are_refused(parts: list[Row], refused: bool) -> None:
    with pytest.raises(RowError) if refused else nullcontext():
        load_format("messages").read(messages(answer(content=parts)))


ROWS_AS_TEXT: list[tuple[str, Row]] = [
    ("preference", {"prompt": [USER], "chosen": [answer()], "rejected": [answer(content="C.")]}),
    ("preference", {"chosen": [USER, answer()], "rejected": [USER, answer(content="C.")]}),
    ("prompt_completion", {"prompt": [USER], "completion": [answer()]}),
    ("prompt_completion", {"prompt": "A?", "completion": [{"from": "gpt", "value": "B."}]}),
    ("prompt", {"prompt": [USER, answer(), USER]}),
    ("rated", {"label": True, "prompt": [USER], "completion": [answer()]}),
]


@pytest.mark.parametrize(("form", "row"), ROWS_AS_TEXT)
def test_lists_of_messages_may_be_json_texts(form: str, row: Row) -> None:
    texts = {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
    assert load_format(form).read(texts) == load_format(form).read(row)


@pytest.mark.parametrize("text", ['[{"role": "user"}]', '[{"a": 1}]', "[]", "[1, 2]", '[{"role": "user", "content"'])
def test_other_json_in_an_answer_stays_text(text: str) -> None:
    made = load_format("prompt_completion").read({"prompt": "A?", "completion": text})
    assert made.messages[1]["content"] == text


@pytest.mark.parametrize(
    ("form", "row", "same"),
    [
        (
            "messages",
            messages(calling(), {"role": "tool", "content": {"é": [1]}}, answer()),
            messages(calling(), {"role": "tool", "content": '{"é": [1]}'}, answer()),
        ),
        (
            "messages",
            messages(calling(), {"role": "ipython", "content": [{"y": 2}]}, answer()),
            messages(calling(), {"role": "tool", "content": '[{"y": 2}]'}, answer()),
        ),
        (
            "messages",
            messages(calling(), {"role": "tool_response", "content": [{"type": "text", "text": "R."}]}, answer()),
            messages(calling(), {"role": "tool", "content": "R."}, answer()),
        ),
        (
            "messages",
            messages(answer(tool_calls=[{"name": "f", "function": CALL}])),
            messages(answer(tool_calls=[CALL])),
        ),
        ("messages", {**messages(answer()), "tools": [json.dumps(CALL)]}, {**messages(answer()), "tools": [CALL]}),
        ("sharegpt", sharegpt("gpt", "B.", role=None, content=None), sharegpt("gpt", "B.")),
        ("rated", {**RATED, "label": 1.0}, RATED),
        ("rated", {**RATED, "label": "1"}, RATED),
        ("rated", {**RATED, "label": "0"}, {**RATED, "label": 0.0}),
        ("preference", {**PREFERENCE, "margin": "0.5"}, {**PREFERENCE, "margin": 0.5}),
    ],
)
def test_another_spelling_of_a_row_is_the_same_row(form: str, row: Row, same: Row) -> None:
    assert load_format(form).read(row) == load_format(form).read(same)


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("preference", {"chosen": [{"role": ["user"], "content": "A?"}], "rejected": [USER]}),
        ("preference", {**PREFERENCE, "margin": "much"}),
        ("rated", {**RATED, "label": "2"}),
        ("rated", {**RATED, "label": 0.5}),
        ("messages", messages(answer(tool_calls=[{"name": "g", "function": CALL}]))),
        ("text", {"content": "A document."}),
        ("prompt_completion", {"question": "A?", "completion": "B."}),
    ],
)
def test_a_value_or_column_that_nothing_reads_is_refused(form: str, row: Row) -> None:
    with pytest.raises(RowError):
        load_format(form).read(row)


def test_the_plural_of_a_key_with_a_list_is_noted() -> None:
    (note,) = load_format("messages").read(messages(answer(tool_call_ids=["c1"]))).notes
    assert note.endswith(": tool_call_ids")


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"instruction": "A?", "output": "B.", "label": 0}, "data.rated_answers"),
        ({"messages": [USER, answer()], "label": "0"}, "data.rated_answers"),
        ({"instruction": "A?", "output": "B.", "label": 2}, None),
    ],
)
def test_a_column_of_ratings_is_refused_where_they_are_not_read(row: Row, code: str | None) -> None:
    with pytest.raises(DataError) if code else nullcontext() as error:
        detect([row, {**row, "label": 1}], SourceSection(path="x"), "x")
    assert code is None or error.value.code == code


def test_the_context_of_an_alpaca_row_is_read() -> None:
    row = {"instruction": "A?", "context": "C.", "output": "B.", "system": "S."}
    reading = detect([row], SourceSection(path="x"), "x")
    assert reading.columns == {"instruction": "instruction", "input": "context", "output": "output", "system": "system"}


def turn(sender: str, value: Any, **keys: Any) -> Row:
    return {"from": sender, "value": value if isinstance(value, str) else json.dumps(value), **keys}


def test_a_turn_of_calls_continues_the_answer_before_it(tokenised: Callable[..., Any]) -> None:
    asked, result, last = turn("human", "A?"), turn("observation", "R."), turn("gpt", "C.")
    one = {"conversations": [asked, turn("gpt", "B."), turn("function_call", CALL), result, last]}
    other = messages(answer(tool_calls=[{"function": CALL}]), {"role": "tool", "content": "R."}, answer(content="C."))
    (ours,), (theirs,) = (tokenised(row, "conversation")[0].examples for row in (one, other))
    assert ours.segments[0].input_ids.tolist() == theirs.segments[0].input_ids.tolist()
    assert ours.segments[0].loss_mask.tolist() == theirs.segments[0].loss_mask.tolist()


def test_turns_that_the_row_marks_differently_stay_apart() -> None:
    found = [turn("human", "A?"), turn("gpt", "B.", train=False), turn("function_call", CALL)]
    made = load_format("sharegpt").read({"conversations": found})
    assert made.train == (None, False, None)
    made = load_format("prompt_completion").read({"prompt": found[:2], "completion": [found[2], found[2]]})
    assert made.train == (None, False, None)
    assert len(made.messages[2]["tool_calls"]) == 2
