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
    Case(
        "a missing data file",
        GONE,
        says=("x.yaml:4", "rowz.jsonl", "did you mean rows.jsonl"),
        error=("data.not_found",),
    ),
    Case(
        "a data file of an unknown type",
        named("x.yaml"),
        says=("x.yaml:4", "unknown file type"),
        error=("data.unknown_file_type",),
    ),
    Case(
        "a broken symbolic link",
        named("l.jsonl"),
        make=lambda: os.symlink("gone", "l.jsonl"),
        says=("l.jsonl", "link"),
        error=("core.broken_link",),
    ),
    Case(
        "a folder without data",
        named("d"),
        make=lambda: os.mkdir("d"),
        says=("no data files",),
        error=("data.no_data_files",),
    ),
    Case(
        "a folder named like a file",
        named("d.jsonl"),
        make=lambda: os.mkdir("d.jsonl"),
        says=("no data file",),
        error=("data.no_data_files",),
    ),
    Case(
        "a pipe",
        named("p.jsonl"),
        make=lambda: os.mkfifo("p.jsonl"),
        says=("p.jsonl", "pipe"),
        error=("data.not_a_regular_file",),
    ),
    Case(
        "a pipe without a file ending, such as <(command)",
        named("p"),
        make=lambda: os.mkfifo("p"),
        says=("pipe",),
        error=("data.not_a_regular_file",),
    ),
    Case("an empty data file", rows="", says=("rows.jsonl is empty",), error=("data.empty",)),
    Case("blank lines only", rows="\n\n \n", says=("rows.jsonl", "empty"), error=("data.empty",)),
    Case(
        "malformed JSON",
        rows=f"{ROW}\n{{broken\n",
        says=("rows.jsonl line 2", "column 2"),
        error=("data.malformed_row",),
    ),
    Case(
        "a line that is not an object",
        rows=f"{ROW}\n[1, 2]\n",
        says=("rows.jsonl line 2", "object"),
        error=("data.malformed_row",),
    ),
    Case(
        "a duplicate JSON key",
        rows='{"prompt": "a", "completion": "b", "prompt": "c"}',
        says=("line 1", "duplicate"),
        error=("data.malformed_row",),
    ),
    Case(
        "JSON nested 3,000 levels deep",
        rows="[" * 3000,
        says=("rows.jsonl line 1", "nested"),
        error=("data.malformed_row",),
    ),
    Case(
        "a number of 5,000 digits",
        rows='{"prompt": ' + "7" * 5000 + "}",
        says=("line 1", "digits"),
        error=("data.malformed_row",),
    ),
    Case(
        "Latin-1 rows",
        rows=ROW.encode() + b'\n{"prompt": "caf\xe9"}',
        says=("line 2", "not UTF-8", "iconv"),
        error=("core.not_utf8",),
    ),
    Case(
        "a row without an answer",
        rows=f"{ROW}\n{json.dumps({'prompt': 'x'})}",
        says=("line 2", "without an answer"),
        error=("data.malformed_row",),
    ),
    Case(
        "answers that are all empty",
        rows=pair("x", "") + "\n" + pair("y", " "),
        says=("no rows left", "answer"),
        error=("data.nothing_left",),
    ),
    Case(
        "an answer that is a list of numbers",
        rows=pair("x", [1]),
        says=("rows.jsonl line 1",),
        error=("data.malformed_row",),
    ),
    Case(
        "columns of an unknown format",
        rows='{"question": "x", "answer": "y", "context": "z"}',
        says=("did you mean columns", "question", "context"),
        error=("data.unknown_format",),
    ),
    Case(
        "a missing column",
        RECIPE.replace("rows.jsonl", "{path: rows.jsonl, columns: {prompt: q}}"),
        says=("'q'",),
        error=("data.bad_columns",),
    ),
    Case(
        "preference pairs",
        rows='{"prompt": "x", "chosen": "y", "rejected": "z"}',
        says=("preference pairs",),
        error=("data.preference_pairs",),
    ),
    Case(
        "an unknown role",
        rows='{"messages": [{"role": "robot", "content": "x"}]}',
        says=("line 1", "unknown role"),
        error=("data.malformed_row",),
    ),
    Case(
        "plain text for fine-tuning",
        rows='{"text": "once upon a time"}',
        says=("plain text", "method"),
        error=("data.text_without_answers",),
    ),
    Case(
        "a CSV row with too few cells",
        named("a.csv"),
        make=lambda: Path("a.csv").write_text("prompt,completion\nx\n"),
        says=("a.csv line 2",),
        error=("data.malformed_row",),
    ),
    Case(
        "a corrupt Parquet file",
        named("a.parquet"),
        make=lambda: Path("a.parquet").write_text("PAR1"),
        says=("a.parquet", "not a Parquet"),
        error=("core.file_damaged",),
    ),
    Case(
        "a corrupt gzip file",
        named("a.jsonl.gz"),
        make=lambda: Path("a.jsonl.gz").write_bytes(b"\x1f\x8b\x08junk"),
        says=("a.jsonl.gz", "gzip"),
        error=("core.file_damaged",),
    ),
    Case(
        "a hub data set without a network",
        named("org/no-such-set"),
        needs_torch=True,
        says=("org/no-such-set",),
        error=("data.not_found",),
    ),
    Case(
        "`max_length` below every prompt",
        RECIPE.replace("64", "8"),
        pair("why? " * 30, "because"),
        needs_torch=True,
        says=("rows.jsonl", "no rows left", "max_length"),
        error=("data.nothing_left",),
    ),
    Case(
        "a row of 50,000 tokens among short ones",
        RECIPE + "  save_steps: end\n",
        f"{ROW}\n{LONG}\n",
        needs_torch=True,
        code=0,
        says=("truncated: question or tool result shortened: 1 (row 2)", "data.max_length (64)"),
    ),
    Case(
        "over-long rows with `overlong: drop`",
        RECIPE.replace("max_length: 64", "max_length: 64\n  overlong: drop") + "  save_steps: end\n",
        f"{ROW}\n{LONG}\n",
        needs_torch=True,
        code=0,
        says=("dropped: longer than max_length 64: 1 (row 2)", "data.overlong"),
    ),
    Case(
        "over-long rows with `overlong: error`",
        RECIPE.replace("max_length: 64", "max_length: 64\n  overlong: error"),
        f"{ROW}\n{LONG}\n",
        needs_torch=True,
        says=("rows.jsonl line 2", "data.max_length (64)"),
        error=("data.sample_too_long",),
    ),
)
