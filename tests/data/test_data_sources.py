"""Files, folders, hub ids and builtin sets are read, and what is wrong with them is said with the place."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halftune.config.rules.files import _folder
from halftune.config.sections.data import BUILTIN_DATA, SourceSection
from halftune.core.errors import DataError
from halftune.data.formats.detect import detect
from halftune.data.pipeline import prepare
from halftune.data.preflight import validate_data
from halftune.data.readers.files import read_file
from halftune.data.sources.source import open_source, skipped_of

GRPO = {"type": "grpo", "rewards": ["exact_answer"], "num_generations": 2, "max_completion_length": 4}
ROWS = [{"instruction": "A?", "output": "B."}, {"instruction": "C?", "output": "D — ü"}]


def read(path, **section):
    return open_source(SourceSection.model_validate({"path": str(path), **section})).read()


def as_csv(delimiter):
    return f'instruction{delimiter}output\nA?{delimiter}B.\nC?{delimiter}"D — ü"\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(ROWS, indent=1)),
        ("a.json", json.dumps({"data": ROWS})),
        ("a.json", "\n".join(map(json.dumps, ROWS))),
        ("a.jsonl", "\n\n".join(map(json.dumps, ROWS))),
        ("a.ndjson", "\ufeff" + "\r\n".join(map(json.dumps, ROWS))),
        ("a.csv", as_csv(",")),
        ("a.tsv", as_csv("\t")),
    ],
)
def test_kinds_of_files(name, text, write):
    assert read(write(text, name)).all() == ROWS


def test_rows_of_a_csv_are_counted_not_their_lines(write):
    rows = read(write('instruction,output\n"A\n\nB?",C.\n\nD?,E.\n', "a.csv"))
    assert [rows.place(index) for index in range(2)] == ["1", "2"]
    assert rows.where(1).endswith("a.csv row 2")


def test_parquet_and_gzip(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet").all() == ROWS
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    assert read(tmp_path / "a.jsonl.gz").all() == ROWS


def test_text_files(write):
    assert [row["text"] for row in read(write("one\ntwo\n", "a.txt")).all()] == ["one", "two"]
    prose = "A paragraph\nof two lines.\n\nAnother.\n"
    assert [row["text"] for row in read(write(prose, "b.txt")).all()] == [prose]
    assert [row["text"] for row in read(write("a = 1\nb = 2\n", "c.py")).all()] == ["a = 1\nb = 2\n"]


def test_a_folder_is_its_files_in_order_and_rows_keep_their_place(write, tmp_path):
    write(ROWS[1:], "set/b.jsonl")
    write(ROWS[:1], "set/a.jsonl")
    write("about this set", "set/README.md")
    rows = read(tmp_path / "set")
    assert rows.all() == ROWS
    assert rows.place(1) == "b.jsonl:1"
    assert rows.where(1).endswith("b.jsonl line 1")


def test_what_datasets_saves_to_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list([*ROWS, {"instruction": "E?", "output": None}]).select([1, 0])
    saved.save_to_disk(tmp_path / "one")
    assert read(tmp_path / "one").all() == ROWS[::-1]
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "both")
    assert read(tmp_path / "both" / "test").all() == ROWS[::-1]
    with pytest.raises(DataError, match=r"both: contains both train/data.*arrow and test/data.*arrow"):
        read(tmp_path / "both")
    (tmp_path / "a.arrow").write_bytes(b"ARROW1 and no more")
    with pytest.raises(DataError, match="not an Arrow file"):
        read(tmp_path / "a.arrow")


@pytest.mark.parametrize("held", ["test.jsonl", "x/validation-00000-of-00001.jsonl", "dev_set.jsonl"])
def test_a_folder_with_a_test_set_is_not_one_source(held, write, tmp_path):
    write(ROWS, "set/train.jsonl")
    write(ROWS, f"set/{held}")
    with pytest.raises(DataError, match="both would be trained"):
        read(tmp_path / "set")
    (tmp_path / "set" / "train.jsonl").rename(tmp_path / "set" / "more.jsonl")
    assert len(read(tmp_path / "set")) == 2 * len(ROWS)


HIDDEN = (".ipynb_checkpoints/a-checkpoint", ".git/objects/b", "deep/.cache/c", "__MACOSX/d", "deep/.e")


@pytest.mark.parametrize("streaming", [False, True])
def test_hidden_folders_are_not_read_and_reported(streaming, write, tmp_path, tokenizer, make_config, monkeypatch):
    for name in ("a", "deep/b", *HIDDEN):
        write(ROWS, f".set/{name}.jsonl")
    write("about this set", ".set/README.md")
    config = make_config(str(tmp_path / ".set"), streaming={"enabled": streaming, "buffer": 8})
    (report,) = prepare(config, tokenizer).report.train
    assert (report.rows, report.kept) == (4, 4)
    assert report.skipped == [
        *(".git", ".ipynb_checkpoints", "README.md", "__MACOSX", "deep/.cache", "deep/.e.jsonl"),
    ]
    assert prepare(config, tokenizer).report.train[0].skipped == report.skipped  # from the cache
    for number in range(9):
        write(ROWS, f".set/.git/{number}.jsonl")
    monkeypatch.setattr("halftune.data.sources.source.MOST", 12)
    assert read(tmp_path / ".set").all() == 2 * ROWS  # what a hidden folder holds does not count


def test_other_files_and_linked_folders_are_reported(write, tmp_path):
    left = ("a.jsonl.zst", "b.jsonl.xz", "c.zip", "d.jsonlines", "part-00001")
    for name in ("a.jsonl", *left, "cat.png", "sound.wav", ".DS_Store"):
        write(ROWS, f"set/{name}")
    write(ROWS, "elsewhere/b.jsonl")
    (tmp_path / "set" / "more").symlink_to(tmp_path / "elsewhere")
    assert skipped_of(str(tmp_path / "set")) == sorted([*left, "more"])


def test_rows_of_files_with_equal_names_have_different_places(write, tmp_path):
    for name in ("set/one/data.jsonl", "set/two/data.jsonl"):
        write(ROWS[:1], name)
    rows = read(tmp_path / "set")
    assert [rows.place(index) for index in range(2)] == ["one/data.jsonl:1", "two/data.jsonl:1"]


@pytest.mark.parametrize(
    ("first", "second", "method"),
    [
        ({"text": "A B C"}, {"content": "D E F"}, "pretrain"),
        ({"prompt": "A?", "completion": "B."}, {"question": "C?", "completion": "D."}, "sft"),
        ({"prompt": "A?", "completion": "B."}, {"question": "C?", "answer": "D."}, "sft"),
    ],
)
def test_a_row_without_a_column_names_its_place(first, second, method, write, tmp_path, make_config):
    write([first] * 3, "set/a.jsonl")
    write([second], "set/b.jsonl")
    with pytest.raises(DataError) as caught:
        validate_data(make_config(str(tmp_path / "set"), method=method))
    assert (caught.value.code, caught.value.where) == ("data.malformed_row", f"{tmp_path / 'set' / 'b.jsonl'} line 1")


def test_a_folder_with_hidden_folders_only_has_no_data(write, tmp_path):
    write(ROWS, "set/.cache/a.jsonl")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "set")
    assert caught.value.code == "data.no_data_files"
    assert [one.code for one in _folder(("data",), str(tmp_path / "set"))] == ["data.no_data_files"]


CHAT = {"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]}
SHORT = {"prompt": "A?", "completion": "B."}


@pytest.mark.parametrize("check", ["prepare", "validate_data", "stream"])
@pytest.mark.parametrize(
    ("first", "second", "method"),
    [
        (SHORT, CHAT, "sft"),
        (CHAT, SHORT, "sft"),
        (ROWS[0], CHAT, "sft"),
        (CHAT, {"conversations": [{"from": "gpt", "value": "B."}]}, "sft"),
        ({"prompt": "A?"}, CHAT, GRPO),
    ],
)
def test_a_folder_of_two_formats_names_both_files(
    check, first, second, method, write, tmp_path, tokenizer, make_config
):
    if check == "stream" and method != "sft":
        pytest.skip("GRPO reads no stream")
    write([first] * 3, "set/a.jsonl")
    write([second], "set/b.jsonl")
    streaming = {"enabled": check == "stream", "buffer": 8}
    config = make_config(str(tmp_path / "set"), method=method, streaming=streaming)
    with pytest.raises(DataError) as caught:
        validate_data(config) if check == "validate_data" else prepare(config, tokenizer)
    assert caught.value.code == "data.ambiguous_folder"
    assert caught.value.where == f"{tmp_path / 'set' / 'b.jsonl'} line 1"
    assert f"{tmp_path / 'set' / 'a.jsonl'} line 1" in str(caught.value)


def test_a_row_that_is_malformed_is_no_other_format(write, tokenizer, make_config):
    path = write([CHAT, {"messages": "x"}, {"note": "y"}])
    with pytest.raises(DataError) as caught:
        prepare(make_config(path), tokenizer)
    assert (caught.value.code, caught.value.where) == ("data.malformed_row", f"{path} line 2")


def test_a_pipe_among_the_files_of_a_folder_is_refused(write, tmp_path):
    (tmp_path / "set").mkdir()
    write("set/a.jsonl", "\n".join(map(json.dumps, ROWS)))
    os.mkfifo(tmp_path / "set" / "b.jsonl")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "set")
    assert caught.value.code == "data.not_a_regular_file"


def test_a_folder_of_everything_is_no_source(write, tmp_path, monkeypatch):
    write(ROWS, "home/data/a.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in (tmp_path, tmp_path / "home"):
        with pytest.raises(DataError, match="home folder"):
            read(folder)
    assert read(tmp_path / "home" / "data").all() == ROWS
    monkeypatch.setattr("halftune.data.sources.source.MOST", 3)
    write("", "home/data/b.md")
    write("", "home/data/c/d.md")
    with pytest.raises(DataError, match="more than 3"):
        read(tmp_path / "home" / "data")


WRONG = [
    ("a.jsonl", '{"a": 1}\n{"a": 2,}\n', r"a\.jsonl line 2: not valid JSON: .* at column 9"),
    ("a.jsonl", '{"a": 1}\n\n[1]\n', r"a\.jsonl line 3: expected an object"),
    ("a.json", '[\n{"a": 1},\n{"a" 2}\n]', r"a\.json line 3: not valid JSON"),
    ("a.json", "[1, 2]", r"a\.json row 1: expected an object"),
    ("a.csv", "a,b\n1,2\n1,2,3\n", r"a\.csv line 3: 3 cells for 2 columns"),
    ("a.csv", 'a,b\n1,"2\n', r"a\.csv line 2: not valid CSV"),
    ("a.xlsx", "x", r"unknown file type '\.xlsx'"),
    ("a.jsonl", "", "the data set is empty"),
    ("a.json", "[]", "the data set is empty"),
    ("a.csv", "a,b\n", "the data set is empty"),
]


@pytest.mark.parametrize(("name", "text", "message"), WRONG)
def test_malformed_files(name, text, message, write):
    with pytest.raises(DataError, match=message):
        read(write(text, name))


def test_bytes_that_are_no_utf8_and_no_gzip(tmp_path):
    latin = tmp_path / "a.jsonl"
    latin.write_bytes('{"a": 1}\n{"a": "ü"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"line 2: not UTF-8: byte 0xfc · .*iconv"):
        read(latin)
    wide = tmp_path / "b.jsonl"
    wide.write_bytes('{"a": "ü"}\n'.encode("utf-16"))
    assert read(wide).all() == [{"a": "ü"}]
    cut = tmp_path / "c.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"a": 1}\n' * 100)[:-9])
    with pytest.raises(DataError, match="gzip"):
        read(cut)


def test_missing_things_are_named(write, tmp_path):
    write(ROWS, "train.jsonl")
    with pytest.raises(DataError, match=r"no such file or folder · did you mean train\.jsonl\?"):
        read(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"did you mean python-docs\?"):
        read("builtin:python-dogs")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no data files"):
        read(tmp_path / "empty")
    write("a,b\n1,2\n", "mixed/a.csv")
    write(ROWS, "mixed/b.jsonl")
    with pytest.raises(DataError, match="several file types"):
        read(tmp_path / "mixed")


def test_a_hub_id_without_a_network_is_a_clear_error():
    with pytest.raises(DataError, match="no such local file"):
        read("halftune-tests/no-such-set")


def test_a_hub_set_is_read_in_batches(monkeypatch):
    from datasets import Dataset

    from halftune.data.readers import rows as limits
    from halftune.data.sources import hub

    found = Dataset.from_dict({"text": ["x" * 400] * 5000}).select(range(7, 5000))
    monkeypatch.setattr(hub, "_load", lambda path, split: found)
    monkeypatch.setattr(limits, "LARGE", 1 << 20)
    section = SourceSection.model_validate({"path": "org/name"})
    rows = hub.hub_rows(section).rows
    assert not isinstance(rows, list)
    assert list(rows) == found.to_list()

    found.info.download_size = 100
    monkeypatch.setattr(limits, "_SMALL", 1 << 20)
    with pytest.raises(DataError) as caught:
        hub.hub_rows(section)
    assert caught.value.code == "data.compressed_too_well"


def test_reading_needs_no_heavy_package():
    code = (
        "import sys, halftune.data.pipeline; print([m for m in ('datasets', 'pandas', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def columns(rows, **section):
    return detect(rows, SourceSection.model_validate({"path": "x", **section}), "x")


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
        ({"conversations": []}, "sharegpt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"text": "a"}, "text"),
    ],
)
def test_formats_are_detected(row, name):
    assert columns([row]).format.name == name


@pytest.mark.parametrize(
    ("row", "mapping"),
    [
        ({"User": "a", "Reply": "b", "id": 3}, "columns: {prompt: User, completion: Reply}"),
        ({"question": "a", "answer": "b", "solution": "c"}, "columns: {prompt: question, completion: answer}"),
        ({"question": "a", "answer": "b", "input": "c"}, "columns: {prompt: question, completion: answer}"),
        (
            {"instruction": "a", "input": "d", "context": "b", "response": "c"},
            "columns: {instruction: instruction, input: context, output: response}",
        ),
        ({"dialog": [{"role": "user", "content": "a"}]}, "columns: {messages: dialog}"),
        ({"content": "a", "url": "b"}, "columns: {text: content}"),
    ],
)
def test_unknown_columns_are_answered_with_a_mapping_that_works(row, mapping):
    with pytest.raises(DataError) as caught:
        columns([row])
    assert caught.value.remedy == f"did you mean {mapping}?"
    pairs = dict(pair.split(": ") for pair in mapping.removeprefix("columns: {").removesuffix("}").split(", "))
    assert columns([row], columns=pairs).columns == pairs


@pytest.mark.parametrize(
    ("row", "name", "mapping"),
    [
        ({"prompt": "a", "response": "b"}, "prompt_completion", {"prompt": "prompt", "completion": "response"}),
        ({"question": "a", "answer": 4, "id": 3}, "prompt_completion", {"prompt": "question", "completion": "answer"}),
        ({"Input": "a", "Output": "b"}, "prompt_completion", {"prompt": "Input", "completion": "Output"}),
        ({"instruction": "a", "response": "b"}, "alpaca", {"instruction": "instruction", "output": "response"}),
        (
            {"instruction": "a", "context": "c", "response": "b", "category": "d"},
            "alpaca",
            {"instruction": "instruction", "input": "context", "output": "response"},
        ),
    ],
)
def test_columns_that_allow_one_reading_need_no_mapping(row, name, mapping):
    reading = columns([row])
    assert (reading.format.name, reading.columns) == (name, mapping)


def test_a_suggestion_says_what_it_does_not_read():
    with pytest.raises(DataError) as caught:
        columns([{"question": "a", "answer": "b", "context": "c"}])
    assert caught.value.remedy.startswith("did you mean columns: {prompt: question, completion: answer}?")
    assert caught.value.remedy.endswith("context")
    with pytest.raises(DataError):  # an answer that is no text
        columns([{"question": "a", "answer": {"text": "b"}}])
    with pytest.raises(DataError, match="kto"):
        columns([{"question": "a", "answer": "b", "label": False}])


def test_columns_that_nobody_can_guess_and_wrong_mappings():
    with pytest.raises(DataError, match=r"columns a, b · .*alpaca: instruction, output"):
        columns([{"a": 1, "b": 2}])
    with pytest.raises(DataError, match=r"no column 'qestion' · did you mean question\?"):
        columns([{"question": "a", "answer": "b"}], columns={"prompt": "qestion", "completion": "answer"})
    with pytest.raises(DataError, match=r"'promt' · did you mean prompt\?"):
        columns([{"question": "a"}], columns={"promt": "question"})
    with pytest.raises(DataError, match="format alpaca needs the column output"):
        columns([{"instruction": "a", "answer": "b"}], format="alpaca")


def test_a_partial_mapping_keeps_the_other_columns_and_gaps_are_counted():
    rows = [{"question": "a", "output": "b", "input": "c", "id": 1}, {"question": "a", "output": "b"}]
    reading = columns(rows, columns={"instruction": "question"})
    assert reading.format.name == "alpaca"
    assert reading.columns == {"instruction": "question", "output": "output", "input": "input"}
    assert reading.absent == ("system", "history", "tools")
    assert reading.unused == ("id",)
    assert reading.gaps == {"input": 1}


def test_the_format_that_reads_what_the_user_maps_goes_before_columns_that_are_there():
    row = {"instruction": "a", "output": "wrong", "response": "right"}
    reading = columns([row], columns={"prompt": "instruction", "completion": "response"})
    assert reading.format.name == "prompt_completion"
    assert reading.rename(row) == {"prompt": "a", "completion": "right"}
    assert reading.unused == ("output",)
    chat = {"messages": [], "text": "a", "body": "b"}
    assert columns([chat], columns={"text": "body"}).rename(chat) == {"text": "b"}


def test_a_mapping_that_the_format_does_not_read_is_an_error():
    row = {"instruction": "a", "output": "b", "question": "c", "answer": "d"}
    with pytest.raises(DataError, match=r"format alpaca reads no prompt and no completion · formats have .*alpaca:"):
        columns([row], format="alpaca", columns={"prompt": "question", "completion": "answer"})
    with pytest.raises(DataError, match="no format reads prompt and output together"):
        columns([row], columns={"prompt": "question", "output": "answer"})
    with pytest.raises(DataError, match="format prompt_completion needs the column prompt"):
        columns([row], columns={"completion": "answer"})


@pytest.mark.parametrize(("good", "bad"), [(True, False), ("true", "false"), ("True", "False")])
@pytest.mark.parametrize("shape", [{"messages": []}, {"prompt": "a", "completion": "b"}])
def test_rated_answers_would_train_the_rejected_ones(shape, good, bad):
    with pytest.raises(DataError) as error:
        columns([{**shape, "label": good}, {**shape, "label": bad}])
    assert error.value.code == "data.rated_answers"
    assert columns([{**shape, "label": good}] * 2).unused == ("label",)
    assert columns([{**shape, "label": "sports"}, {**shape, "label": 0}]).unused == ("label",)


def test_preference_pairs_have_no_answer():
    row = {"conversations": [{"from": "human", "value": "A?"}], "chosen": {"value": "B"}, "rejected": {"value": "C"}}
    with pytest.raises(DataError, match="preference pairs"):
        columns([row])


@pytest.mark.slow
def test_builtin_sets(tokenizer, make_config):
    quickstart = {"number-formats", "number-formats-test", "number-formats-text"}
    drawn = {"patterns", "patterns-test", "motions", "motions-test", "tones", "tones-test"}
    assert set(BUILTIN_DATA) == {"stdlib-text", "python-docs", "python-pairs", "python-rated"} | quickstart | drawn
    rows = read("builtin:python-docs").all()
    assert len(rows) == 1500
    assert len({row["output"] for row in rows}) == len({row["instruction"] for row in rows}) == 1500
    assert all(row["output"].isascii() and len(row["output"]) <= 400 for row in rows)
    rated = read("builtin:python-rated").all()
    assert [row["label"] for row in rated[:3]] == [True, False, True]
    assert [row["completion"] == one["output"] for row, one in zip(rated[:3], rows, strict=False)] == [
        True,
        False,
        True,
    ]
    text = read("builtin:stdlib-text").all()
    assert 1_000_000 < sum(len(row["text"]) for row in text) < 4_000_000
    assert text == read("builtin:stdlib-text").all()
    prepared = prepare(make_config("builtin:python-docs", max_length=256), tokenizer)
    assert len(prepared.train) == 1500


def test_the_quickstart_tests_no_question_that_it_trains():
    trained, tested = (read(f"builtin:number-formats{part}").all() for part in ("", "-test"))
    questions = [row["prompt"] for row in trained + tested]
    assert len(questions) == len(set(questions))
    assert {row["completion"] for row in tested} == {row["completion"] for row in trained}
    documents = [row["text"].split("\n") for row in read("builtin:number-formats-text").all()]
    assert not {row["prompt"] for row in tested} & {line for lines in documents for line in lines}


@pytest.fixture
def large(monkeypatch):
    """Every file counts as large."""
    monkeypatch.setattr("halftune.data.readers.rows.LARGE", 0)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"])
def test_rows_of_large_files_are_parsed_on_each_pass(name, tmp_path, large):
    rows = [{"text": f"row {number} é", "tools": [{"a": None if number % 2 else number}]} for number in range(9)]
    lines = "\ufeff" + "\n\u00a0\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path = tmp_path / name
    if name.endswith("jsonl"):
        path.write_text(lines, encoding="utf-8")
    elif name.endswith("gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        table = pyarrow.Table.from_pylist(rows)
        if name == "a.parquet":
            parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_file(str(path), table.schema) as file:
                file.write_table(table)
    found = read(path)
    assert not isinstance(found.parts[0].rows, list)
    columnar = name in ("a.parquet", "a.arrow")
    kept = [{**row, "tools": [{}]} if columnar and number % 2 else row for number, row in enumerate(rows)]
    assert found.all() == found.all() == kept
    assert len(found) == 9
    assert [index for index in range(9) if found.note(index)] == ([1, 3, 5, 7] if columnar else [])
    assert found.where(2).endswith("row 3" if columnar else "line 7")


@pytest.mark.parametrize(("name", "text", "message"), [case for case in WRONG if case[0] == "a.jsonl"])
def test_malformed_large_files(name, text, message, write, large):
    with pytest.raises(DataError, match=message):
        read(write(text, name)).all()


def test_bytes_of_a_large_file_that_are_no_utf8(tmp_path, large):
    latin = tmp_path / "a.jsonl"
    latin.write_bytes('{"a": 1}\n{"a": "ü"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"line 2: not UTF-8: byte 0xfc"):
        read(latin).all()
    wide = tmp_path / "b.jsonl"
    wide.write_bytes('{"a": "ü"}\n'.encode("utf-16"))
    assert read(wide).all() == [{"a": "ü"}]


def test_content_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """It would be kept in the cache under the hash of what was there before."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n')
    source = open_source(SourceSection(path=str(path)))
    source.check()
    path.write_text('{"text": "two"}\n')
    with pytest.raises(DataError) as error:
        source.check()
    assert error.value.code == "data.changed_during_run"


def test_a_byte_order_mark_between_joined_files_is_named(tmp_path: Path) -> None:
    row = '{"prompt": "1 + 1?", "completion": "2"}\n'.encode("utf-8-sig")
    (tmp_path / "joined.jsonl").write_bytes(row + row)
    with pytest.raises(DataError) as caught:
        read_file(tmp_path / "joined.jsonl")
    assert (caught.value.code, caught.value.where) == ("data.malformed_row", f"{tmp_path / 'joined.jsonl'} line 2")
    assert "U+FEFF" in caught.value.what
