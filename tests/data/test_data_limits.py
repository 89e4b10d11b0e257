"""Templates and files of strangers that ask for too much with a certain row are refused before the memory is full."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from patience import LIMIT

from halftune.config.sections.data import SourceSection
from halftune.core.errors import DataError
from halftune.data.formats.conversation import RowDropped
from halftune.data.pipeline import prepare
from halftune.data.sources.source import open_source
from halftune.data.templates import render as chat
from halftune.data.templates.render import ChatTemplate, with_date

ROWS = [{"prompt": f"What is {number}?", "completion": f"It is {number}."} for number in range(8)]
FRAME = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOMB = "{% if 'is 6' in messages[0].content %}%s{% endif %}" + FRAME


@pytest.mark.slow
@pytest.mark.parametrize(
    ("greed", "said"),
    [
        ("{{ 'a' * (messages | length * 1000000000) }}", "GiB of memory"),
        (
            "{% set n = namespace(t='a') %}{% for _ in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
            "GiB of memory",
        ),
        ("{{ 'a' * 3000000 }}", "characters"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "CPU time"),
    ],
    ids=["product", "doubling", "length", "time"],
)
def test_a_template_that_explodes_with_one_row(
    make_tokenizer, make_config, write, monkeypatch: pytest.MonkeyPatch, greed: str, said: str
) -> None:
    monkeypatch.setattr(chat, "_SECONDS", 2 if said == "CPU time" else LIMIT)
    before = resource.getrlimit(resource.RLIMIT_AS)
    tokenizer = make_tokenizer(template=BOMB.replace("%s", greed))
    assert len(prepare(make_config(write(ROWS[:6])), tokenizer).train) == 6
    with pytest.raises(DataError) as caught:
        prepare(make_config(write(ROWS)), tokenizer)
    assert said in caught.value.what
    assert str(caught.value.where).endswith("line 7")
    assert "model.chat_template" in caught.value.remedy
    assert resource.getrlimit(resource.RLIMIT_AS) == before


DATED = "{{ '<|im_start|>system\nToday: ' ~ strftime_now('%d %b %Y') ~ '<|im_end|>\n' }}" + FRAME


def clock(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    class Clock(date):
        @classmethod
        def today(cls) -> date:
            return date.fromisoformat(day)

    monkeypatch.setattr("halftune.data.pipeline.date", Clock)


def shown(prepared: Any, tokenizer: Any) -> str:
    return tokenizer.decode(prepared.train.example(0).segments[0].input_ids)


def test_a_template_writes_one_day_throughout_a_run(
    make_tokenizer, make_config, write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, config = make_tokenizer(template=DATED), make_config(write(ROWS), cache=True)
    clock(monkeypatch, "2031-03-01")
    with caplog.at_level("INFO"):
        first = prepare(config, tokenizer)
    assert sum("2031-03-01" in line for line in caplog.messages) == 1
    assert first.day == "2031-03-01"
    assert "Today: 01 Mar 2031" in shown(first, tokenizer)
    clock(monkeypatch, "2031-03-02")
    assert "Today: 02 Mar 2031" in shown(prepare(config, tokenizer), tokenizer), "the cache is of another day"
    assert shown(prepare(config, tokenizer, "2031-03-01"), tokenizer) == shown(first, tokenizer)
    assert tokenizer.chat_template == DATED


def test_tokens_without_a_date_serve_on_every_day(
    make_tokenizer, make_config, write, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, config = make_tokenizer(), make_config(write(ROWS), cache=True)
    for day in ("2031-03-01", "2031-03-02"):
        clock(monkeypatch, day)
        assert prepare(config, tokenizer).day is None
    assert len([path for path in (own_cache / "data").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ strftime_now('%Y-%m-%d') }}", "2031-03-01"),
        ("{% set f = '%-d. %B %Y, %H:%M:%S' %}{{ strftime_now(f) }}", "1. March 2031, 00:00:00"),
        ("{{ strftime_now('100%% on %A') }}", "100% on Saturday"),
        ("{% macro a() %}{{ strftime_now('%y') | int + 1 }}{% endmacro %}\n{{ a() }}", "32"),
        ("{% if strftime_now is defined %}{% set d = strftime_now('%j') %}{% endif %}\n  {{ d }}\n", "  060"),
    ],
)
def test_the_day_is_written_in_every_form(make_tokenizer, template: str, expected: str) -> None:
    tokenizer = make_tokenizer(template=template)
    messages = [{"role": "user", "content": "a"}]
    render = tokenizer.apply_chat_template
    dated = with_date(template, date(2031, 3, 1))
    assert render(messages, tokenize=False, chat_template=dated) == expected
    day = date.today()
    ours, theirs = (render(messages, tokenize=False, chat_template=one) for one in (with_date(template, day), None))
    if "%H" not in template and day == date.today():  # else it is midnight
        assert ours == theirs


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(n=0, f='{}{}'.format) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}"
        "{{ loop.cycle('a', 'b') }}{{ loop.nextitem is defined }}{{ ns.none }}{{ ns.f(ns.n, m.name) }}{% endfor %}",
        "{% macro turn(m, end='|') %}{{ m.role ~ end ~ varargs | length }}{{ kwargs.x }}{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{{ turn(m, end='!', x=loop.last) }}{{ turn(m, 1, 2) }}{% endfor %}",
        "{% macro wrap() %}<{{ caller() }}>{% endmacro %}{% for m in messages %}"
        "{% call wrap() %}{{ m.content }}{{ m.keys() | list }}{% endcall %}{% endfor %}{{ turn is defined }}",
    ],
)
def test_fast_access_to_loops_namespaces_and_macros(make_tokenizer, template: str) -> None:
    tokenizer = make_tokenizer(template=template)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert ChatTemplate(tokenizer).render(messages) == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("hole", ["loop.__class__", "namespace(a=1).__init__", "turn.__call__.__globals__"])
def test_fast_access_stays_in_the_sandbox(make_tokenizer, hole: str) -> None:
    template = "{% macro turn() %}{% endmacro %}{% for m in messages %}{{ " + hole + ".x }}{% endfor %}"
    with pytest.raises(RowDropped):
        ChatTemplate(make_tokenizer(template=template)).render([{"role": "user", "content": "a"}])


def read(path: Path) -> list[dict[str, Any]]:
    return open_source(SourceSection(path=str(path))).read().all()


@pytest.mark.parametrize("kind", ["dictionary", "compressed"])
def test_a_small_parquet_file_that_would_fill_the_memory(tmp_path: Path, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path, text = tmp_path / "a.parquet", "a" * (1 << 20)
    if kind == "dictionary":  # 64 GiB: one text, and 65,536 rows that name it
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * (1 << 16), "int32"), pyarrow.array([text]))
        parquet.write_table(pyarrow.table({"text": column}), path, store_schema=False)
    else:
        parquet.write_table(
            pyarrow.table({"text": [f"{number}{text}" for number in range(80)]}),
            path, compression="zstd", use_dictionary=False,
        )  # fmt: skip
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match="decompresses to") as caught:
        read(path)
    assert caught.value.where == str(path)


READ_WITHIN_LIMITS = """
import resource, sys
from pathlib import Path
from halftune.core.errors import DataError
from halftune.data.readers import columnar, files, rows

columnar._SLACK, rows._SMALL = 1 << 28, 1 << 20
before = resource.getrlimit(resource.RLIMIT_AS)
try:
    files.read_file(Path(sys.argv[1]))
except DataError as error:
    print(error.code)
print(resource.getrlimit(resource.RLIMIT_AS) == before)
"""


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_text_that_one_row_names_many_times(tmp_path: Path, kind: str) -> None:
    """In a process of its own: one that has trained keeps freed memory, and the limit is on what is taken anew."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, "int32"), pyarrow.array(["a" * (1 << 20)]))
    names = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1000], "int32"), texts)  # 1 GiB
    path, table = tmp_path / f"a.{kind}", pyarrow.table({"text": ["x"], "names": names})
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
        with pyarrow.ipc.new_file(str(path), table.schema, options=options) as file:
            file.write_table(table)
    command = [sys.executable, "-c", READ_WITHIN_LIMITS, str(path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["data.compressed_too_well", "True"]


def test_an_arrow_file_is_not_read_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first bytes are then a length of 1.3 GB, of which a large file has enough."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist([{"text": "a"}])
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    monkeypatch.setattr(pyarrow.ipc, "open_stream", lambda *_: pytest.fail("read as a stream"))
    assert read(tmp_path / "a.arrow") == [{"text": "a"}]


def test_parquet_in_several_groups_and_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    monkeypatch.setattr("halftune.data.readers.columnar._BATCH", 3)
    rows = [{"text": f"row {number}", "tags": [{"a": number, "b": None}]} for number in range(20)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    assert read(tmp_path / "a.parquet") == [json.loads(json.dumps(row).replace(', "b": null', "")) for row in rows]
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="empty"):
        read(tmp_path / "none.parquet")
