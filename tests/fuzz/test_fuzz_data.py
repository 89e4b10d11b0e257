"""Whatever stands in a data file: samples and a report, or a sentence."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from fuzz_harness import Damage, answered, budget
from fuzz_strategies import GOOD, conversations, damages, json_damages, odd, texts
from hypothesis import given
from hypothesis import strategies as st

from halftune.config.load import load_config
from halftune.config.sections.model import ModelSection
from halftune.data.pipeline import prepare
from halftune.data.preflight import validate_data
from halftune.model.tokenizer.tokenizer import load_tokenizer

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "1"},
                {"role": "assistant", "content": [{"type": "text", "text": "b"}], "train": True},
            ],
            "tools": [{"name": "f", "parameters": {}}],
        },
    ],
    "sharegpt": [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"}],
    "alpaca": [{"instruction": "a", "input": "", "output": "b", "history": [["c", "d"]]}],
    "prompt_completion": [
        {"prompt": "a", "completion": "b"},
        {"prompt": [{"role": "user", "content": "a"}], "completion": "c"},
    ],
    "text": [{"text": "once upon a time"}],
}
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".md", ".jsonl.gz", ".parquet")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelSection(name_or_path="builtin:qwen2-tiny"))


def feed(name: str, tokenizer: Any, **data: Any) -> None:
    """What ``halftune data`` and ``train`` do with a file."""
    method = data.pop("method", "sft")
    recipe = {
        **GOOD,
        "method": method,
        "data": {"train": name, "max_length": 64, "cache": False, "num_workers": 1, **data},
    }
    Path("x.yaml").write_text(json.dumps(recipe))
    with answered():
        config = load_config("x.yaml").run
        validate_data(config)
        report = prepare(config, tokenizer).report
        json.dumps(report.to_dict())
        source = report.train[0]
        assert source.kept + sum(count.count for count in source.dropped.values()) == source.taken


options = st.fixed_dictionaries(
    {},
    optional={
        "overlong": st.sampled_from(("truncate", "drop", "error")),
        "packing": st.booleans(),
        "eval_split": st.sampled_from((0.5, 1, 0)),
        "max_length": st.sampled_from((8, 16, 64)),
        "method": st.sampled_from(("sft", "pretrain", {"type": "sft", "train_on": "all"})),
        "system": texts,
    },
)


@pytest.mark.slow
@budget(0.15, 60)
@given(kind=st.sampled_from(sorted(ROWS)), damage=json_damages(), options=options, listed=st.booleans())
def test_rows(here: Path, tokenizer: Any, kind: str, damage: Any, options: dict[str, Any], listed: bool) -> None:
    rows = damage(ROWS[kind] * 2)
    name = "x.json" if listed else "x.jsonl"
    options = {**options, "method": "pretrain"} if kind == "text" else options
    text = json.dumps(rows) if listed else "\n".join(map(json.dumps, rows if isinstance(rows, list) else [rows]))
    Path(name).write_text(text, encoding="utf-8", errors="replace")
    feed(name, tokenizer, **options)


@budget(0.05, 20)
@given(
    rows=st.lists(
        conversations | st.dictionaries(st.sampled_from(("messages", "text", "prompt", "completion")) | texts, odd),
        max_size=3,
    )
    | st.lists(conversations, min_size=1, max_size=3)
)
def test_random_rows(here: Path, tokenizer: Any, rows: list[Any]) -> None:
    Path("x.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8", errors="replace")
    feed("x.jsonl", tokenizer)


@budget(0.1, 50)
@given(kind=st.sampled_from(sorted(ROWS)), ending=st.sampled_from(ENDINGS), damage=damages())
def test_damaged_files(here: Path, tokenizer: Any, kind: str, ending: str, damage: Damage) -> None:
    rows = ROWS[kind] * 2
    raw = "\n".join(map(json.dumps, rows)).encode()
    if ending in (".csv", ".tsv"):
        raw = 'prompt,completion\na,b\n"c\n",d\n'.replace(",", "," if ending == ".csv" else "\t").encode()
    elif ending == ".parquet":
        raw = parquet(rows)
    if ending.endswith(".gz"):
        raw = gzip.compress(raw, mtime=0)
    Path(f"x{ending}").write_bytes(damage(raw))
    feed(f"x{ending}", tokenizer, method="pretrain" if kind == "text" or ending in (".txt", ".md") else "sft")


def parquet(rows: list[dict[str, Any]]) -> bytes:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    simple = [{"prompt": "a", "completion": "b"}] * len(rows)
    parquet.write_table(arrow.Table.from_pylist(simple), "made.parquet")
    return Path("made.parquet").read_bytes()
