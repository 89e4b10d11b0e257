"""What other readers bend quietly is named: double keys, half characters, NaN, nulls that Arrow adds."""

from __future__ import annotations

import json

import pytest

from halftune.config.sections.data import SourceSection
from halftune.core.errors import DataError
from halftune.data.formats.fields import NOT_FINITE
from halftune.data.pipeline import prepare
from halftune.data.readers.columnar import ARROW_NULLS
from halftune.data.sources.source import open_source

GOOD = {"prompt": "A?", "completion": "B."}
CHAT = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]
LINE = json.dumps(GOOD)


def read(path):
    return open_source(SourceSection.model_validate(str(path))).read()


def decoded(prepared, tokenizer):
    return [
        tokenizer.decode(prepared.train.example(index).segments[0].input_ids) for index in range(len(prepared.train))
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "A?", "completion": "B.", "prompt": "C?"}', "duplicate JSON key 'prompt'"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "duplicate JSON key 'content'"),
        (r'{"prompt": "A\ud83d?", "completion": "B."}', "lone surrogate"),
        ('{"prompt": "A?", "completion": ' + "7" * 5000 + "}", "more than 4300 digits"),
        ("[" * 100_000, "nested more than 100 levels"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "nested more than 100 levels"),
    ],
)
def test_lines_that_json_would_bend_or_break_on_are_named(line, message, write):
    with pytest.raises(DataError, match=rf"data\.jsonl line 2: .*{message}"):
        read(write(f"{LINE}\n{line}\n"))
    with pytest.raises(DataError, match=rf"data\.json.*: .*{message}"):
        read(write(f"[{LINE},\n{line}]", "data.json"))


def test_the_row_of_a_json_list_is_named(write):
    with pytest.raises(DataError, match=r"data\.json row 2: duplicate JSON key 'a'"):
        read(write(f'[{LINE}, {{"a": 1, "a": 1}}, {LINE}]', "data.json"))


def test_whole_surrogate_pairs_and_the_same_key_in_different_objects_are_fine(write):
    line = r'{"prompt": "\ud83d\ude00", "tools": [{"name": "f"}, {"name": "g"}], "completion": "B."}'
    assert read(write(line)).all()[0]["prompt"] == "😀"


def test_json_inside_a_text_is_read_as_strictly(tokenizer, make_config, write):
    def row(arguments):
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        return write([{"messages": [CHAT[0], call]}])

    for arguments, message in [
        ('{"x": 1, "x": 2}', "duplicate JSON key 'x'"),
        (r'{"x": "\ud83d"}', "lone surrogate"),
        ('{"x": NaN}', "NaN and Infinity"),
        ("[" * 50_000, "nested more than 100 levels"),
    ]:
        with pytest.raises(DataError, match=rf"line 1: message 2: arguments of a tool call.*{message}"):
            prepare(make_config(row(arguments)), tokenizer)


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
def test_a_header_that_names_a_column_twice(name, delimiter, write):
    text = "\n".join(delimiter.join(cells) for cells in (["prompt", "completion", "completion"], ["A?", "B.", "C."]))
    with pytest.raises(DataError, match=rf"{name} line 1: duplicate column names: 'completion'"):
        read(write(text, name))


def test_parquet_that_names_a_column_twice(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = arrow.table([["A?"], ["B."], ["C."]], names=["prompt", "completion", "completion"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: duplicate column names: 'completion'"):
        read(tmp_path / "a.parquet")


def test_members_that_arrow_adds_to_tool_calls_are_taken_out_and_counted(tmp_path, tokenizer, make_config, write):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    def row(name, arguments):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]}

    rows = [row("f", {"x": 1}), row("g", {"y": "z"}), {"messages": CHAT}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    prepared = prepare(make_config(str(tmp_path / "a.parquet")), tokenizer)
    plain = prepare(make_config(write(rows)), tokenizer)
    assert decoded(prepared, tokenizer) == decoded(plain, tokenizer)
    assert prepared.report.train[0].notes[ARROW_NULLS].rows == ["1", "2"]


def test_not_a_number_is_no_answer_and_no_text(tokenizer, make_config, write):
    rows = [
        {"instruction": "A?", "input": float("nan"), "output": "B."},
        {"instruction": "C?", "input": "", "output": float("nan")},
        {"instruction": "D?", "input": "", "output": float("inf")},
        {"instruction": "E?", "input": "x", "output": 7.5},
    ]
    prepared = prepare(make_config(write(rows)), tokenizer)
    source = prepared.report.train[0]
    assert source.dropped["the answer is empty"].rows == ["2", "3"]
    assert source.notes[NOT_FINITE].rows == ["1"]
    assert source.gaps["input"] == 1
    texts = decoded(prepared, tokenizer)
    assert "7.5<|im_end|>" in texts[1]
    assert not any("nan" in text.lower() for text in texts)
    chat = [{"role": "system", "content": float("nan")}, *CHAT]
    assert "nan" not in decoded(prepare(make_config(write([{"messages": chat}])), tokenizer), tokenizer)[0].lower()
    with pytest.raises(DataError, match="the text is empty: 1"):
        prepare(make_config(write([{"text": float("nan")}], "t.jsonl"), method="pretrain"), tokenizer)


def test_a_json_file_that_is_one_object(write):
    assert read(write(json.dumps({"messages": CHAT}), "a.json")).all() == [{"messages": CHAT}]
    assert read(write(json.dumps({"id": 3, "dialogue": CHAT}), "b.json")).all() == [{"id": 3, "dialogue": CHAT}]
    assert read(write(json.dumps({"version": 1, "data": [GOOD, GOOD]}), "c.json")).all() == [GOOD, GOOD]
    with pytest.raises(DataError, match=r"d\.json: contains several lists of rows: train, test"):
        read(write(json.dumps({"train": [GOOD], "test": [GOOD]}), "d.json"))
