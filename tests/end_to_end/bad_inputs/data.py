"""Mistakes in data files."""

from __future__ import annotations

import json
import os
from pathlib import Path

from bad_inputs.case import RECIPE, ROW, Case

GONE = RECIPE.replace("rows.jsonl", "rowz.jsonl")


def named(name: str) -> str:
    """The recipe with another data file."""
    return RECIPE.replace("rows.jsonl", name)


def pair(prompt: object, completion: object) -> str:
    return json.dumps({"prompt": prompt, "completion": completion})


LONG = pair("why? " * 50_000, "because")
CASES = (
    Case("a missing data file", GONE, says=("x.yaml:4", "rowz.jsonl", "did you mean rows.jsonl")),
    Case("a data file of an unknown kind", named("x.yaml"), says=("x.yaml:4", "unknown kind of file")),
    Case("a link to nothing", named("l.jsonl"), make=lambda: os.symlink("gone", "l.jsonl"), says=("l.jsonl", "link")),
    Case("a folder without data", named("d"), make=lambda: os.mkdir("d"), says=("holds no data file",)),
    Case("a folder named like a file", named("d.jsonl"), make=lambda: os.mkdir("d.jsonl"), says=("no data file",)),
    Case("a pipe", named("p.jsonl"), make=lambda: os.mkfifo("p.jsonl"), says=("p.jsonl", "pipe")),
    Case("an empty data file", rows="", says=("rows.jsonl is empty",)),
    Case("blank lines only", rows="\n\n \n", says=("rows.jsonl", "empty")),
    Case("malformed JSON", rows=f"{ROW}\n{{broken\n", says=("rows.jsonl line 2", "column 2")),
    Case("a line that is no object", rows=f"{ROW}\n[1, 2]\n", says=("rows.jsonl line 2", "object")),
    Case("a key that stands twice", rows='{"prompt": "a", "completion": "b", "prompt": "c"}', says=("line 1", "twice")),
    Case("JSON nested 3,000 deep", rows="[" * 3000, says=("rows.jsonl line 1", "nested")),
    Case("a number of 5,000 digits", rows='{"prompt": ' + "7" * 5000 + "}", says=("line 1", "digits")),
    Case("Latin-1 rows", rows=ROW.encode() + b'\n{"prompt": "caf\xe9"}', says=("line 2", "not UTF-8", "iconv")),
    Case("a row without an answer", rows=f"{ROW}\n{json.dumps({'prompt': 'x'})}", says=("line 2", "without an answer")),
    Case("answers that are all empty", rows=pair("x", "") + "\n" + pair("y", " "), says=("no row is left", "answer")),
    Case("an answer that is a list of numbers", rows=pair("x", [1]), says=("rows.jsonl line 1",)),
    Case(
        "columns of no format",
        rows='{"question": "x", "answer": "y", "context": "z"}',
        says=("did you mean columns", "question", "context"),
    ),
    Case(
        "a column that is not there",
        RECIPE.replace("rows.jsonl", "{path: rows.jsonl, columns: {prompt: q}}"),
        says=("'q'",),
    ),
    Case("preference pairs", rows='{"prompt": "x", "chosen": "y", "rejected": "z"}', says=("preference pairs",)),
    Case("an unknown role", rows='{"messages": [{"role": "robot", "content": "x"}]}', says=("line 1", "unknown role")),
    Case("plain text for fine-tuning", rows='{"text": "once upon a time"}', says=("plain text", "method")),
    Case(
        "a CSV row with too few cells",
        named("a.csv"),
        make=lambda: Path("a.csv").write_text("prompt,completion\nx\n"),
        says=("a.csv line 2",),
    ),
    Case(
        "a damaged Parquet file",
        named("a.parquet"),
        make=lambda: Path("a.parquet").write_text("PAR1"),
        says=("a.parquet", "not a Parquet"),
    ),
    Case(
        "a damaged gzip file",
        named("a.jsonl.gz"),
        make=lambda: Path("a.jsonl.gz").write_bytes(b"\x1f\x8b\x08junk"),
        says=("a.jsonl.gz", "gzip"),
    ),
    Case("a hub data set without a network", named("org/no-such-set"), needs_torch=True, says=("org/no-such-set",)),
    Case(
        "`max_length` below every prompt",
        RECIPE.replace("64", "8"),
        pair("why? " * 30, "because"),
        needs_torch=True,
        says=("rows.jsonl", "no row is left", "max_length"),
    ),
    Case(
        "one row of 50,000 tokens among others",
        RECIPE + "  save_steps: end\n",
        f"{ROW}\n{LONG}\n",
        needs_torch=True,
        code=0,
        says=("made to fit: question or tool result shortened: 1 (row 2)", "data.max_length (64)"),
    ),
    Case(
        "over-long rows that are dropped",
        RECIPE.replace("max_length: 64", "max_length: 64\n  overlong: drop") + "  save_steps: end\n",
        f"{ROW}\n{LONG}\n",
        needs_torch=True,
        code=0,
        says=("left out: longer than max_length 64: 1 (row 2)", "data.overlong"),
    ),
    Case(
        "over-long rows that must not be there",
        RECIPE.replace("max_length: 64", "max_length: 64\n  overlong: error"),
        f"{ROW}\n{LONG}\n",
        needs_torch=True,
        says=("rows.jsonl line 2", "more than data.max_length 64"),
    ),
)
