"""One value of a recipe's text changes, everything else stays as it was written."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halftune.config.shape import shape_at
from halftune.config.tree import child
from halftune_webui.recipes.yaml_edit import ABSENT, child_at, read, render, set_value

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TEXT = """\
# a recipe
model:
  name_or_path: builtin:qwen2-tiny   # offline
precision: bf16          # auto | bf16
data:
  # two sources
  train:
    - path: a.jsonl   # first
      samples: 3
    - b.jsonl
  max_length: 64
method: {type: sft}  # flow
training:
  output_dir: runs/x
logging:
  run_name: one   # the only key
"""


def lines_changed(before: str, after: str) -> tuple[list[str], list[str]]:
    old, new = before.splitlines(), after.splitlines()
    return [line for line in old if line not in new], [line for line in new if line not in old]


@pytest.mark.parametrize(
    ("path", "value", "gone", "come"),
    [
        (
            ("precision", "compute"),
            "fp16",
            ["precision: bf16          # auto | bf16"],
            ["precision: fp16          # auto | bf16"],
        ),
        (
            ("precision", "tf32"),
            True,
            ["precision: bf16          # auto | bf16"],
            ["precision: {compute: bf16, tf32: true} # auto | bf16"],
        ),
        (("data", "max_length"), 128, ["  max_length: 64"], ["  max_length: 128"]),
        (("data", "max_length"), ABSENT, ["  max_length: 64"], []),
        (("data", "cache"), False, [], ["  cache: false"]),
        (("data", "train", 0, "samples"), ABSENT, ["      samples: 3"], []),
        (("data", "train", 0, "weight"), 2.0, [], ["      weight: 2.0"]),
        (("data", "train", 1, "samples"), 5, ["    - b.jsonl"], ["    - {path: b.jsonl, samples: 5}"]),
        (("data", "train", 2), {"path": "c"}, [], ["    - {path: c}"]),
        (("data", "train", 1), ABSENT, ["    - b.jsonl"], []),
        (
            ("method", "train_on"),
            "last",
            ["method: {type: sft}  # flow"],
            ["method: {type: sft, train_on: last}  # flow"],
        ),
        (("logging", "run_name"), ABSENT, ["logging:", "  run_name: one   # the only key"], []),
        (("generation", "top_p"), 0.5, [], ["generation:", "  top_p: 0.5"]),
    ],
)
def test_only_the_line_changes(path: Any, value: Any, gone: list[str], come: list[str]) -> None:
    assert lines_changed(TEXT, set_value(TEXT, path, value)) == (gone, come)


def test_an_anchor_used_elsewhere_keeps_its_value() -> None:
    text = "model: {name_or_path: x}\ndata:\n  train: &all [a.jsonl]\n  eval: *all\n"
    changed = read(set_value(text, ("data", "eval", 0, "path"), "b.jsonl")).values
    assert changed["data"] == {"train": [{"path": "a.jsonl"}], "eval": [{"path": "b.jsonl"}]}


def test_text_that_is_only_comments_becomes_a_recipe() -> None:
    assert set_value("# mine\n", ("model", "name_or_path"), "x") == "# mine\nmodel:\n  name_or_path: x\n"


@pytest.mark.parametrize(
    ("path", "value", "left"),
    [
        (("adapter", "rank"), False, {"adapter": {"type": "lora"}}),  # an adapter without a type is one of LoRA
        (("adapter", "rank"), 3, {"adapter": {"type": "lora"}}),
        (("data", "train", 0, "path"), "x", {"data": {"max_length": 8, "train": [{}]}}),
    ],
)
def test_the_only_key_of_a_section_goes_and_comments_stay(path: Any, value: Any, left: Any) -> None:
    text = "# mine\ndata:\n  max_length: 8  # short\n"
    changed = set_value(set_value(text, path, value), path, ABSENT)
    assert lines_changed(text, changed)[0] == []
    assert read(changed).values == {**read(text).values, **left}


def test_block_scalar_ends_where_it_ends() -> None:
    text = "data:\n  system: |\n    one\n    two\n\n  max_length: 8\nmodel: {name_or_path: x}\n"
    assert set_value(text, ("data", "system"), "three") == (
        "data:\n  system: three\n\n  max_length: 8\nmodel: {name_or_path: x}\n"
    )


KEYS = [
    ("precision", "compute"),
    ("precision", "tf32"),
    ("attention", "guard"),
    ("data", "train", 0, "path"),
    ("data", "train", 0, "samples"),
    ("data", "eval"),
    ("data", "system"),
    ("data", "packing", "split"),
    ("adapter", "rank"),
    ("training", "learning_rate"),
    ("logging", "sample_prompts"),
    ("generation", "top_k"),
]
LISTS = {("data", "eval"), ("logging", "sample_prompts")}
VALUES = st.one_of(
    st.just(ABSENT),
    st.booleans(),
    st.integers(-9, 99),
    st.floats(1e-6, 1e6),
    st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12),
    st.lists(st.sampled_from(["a, b", "#c", "d: e", "- f"]), max_size=3),
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(["qwen_lora_bf16.yaml", "quickstart.yaml", ""]),
    changes=st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=4),
)
def test_every_change_sets_its_value_and_no_other(name: str, changes: list[tuple[Any, Any]]) -> None:
    text = (CONFIGS / name).read_text() if name else TEXT
    for path, value in changes:
        if isinstance(value, list) and path not in LISTS:
            continue  # a short form cannot hold one, and the form never writes one there
        before = read(text).values
        text = set_value(text, path, value)
        after = read(text).values
        found = child_at(after, path)
        wanted = read(render(nested(path, value))).values if value is not ABSENT else None
        assert found is ABSENT if wanted is None else found == child_at(wanted, path)
        assert without(before, path) == without(after, path)
        assert text.startswith("#"), "comments are kept"


def nested(path: Any, value: Any) -> dict[str, Any]:
    assert shape_at(path) is not None
    *above, last = path
    inner: Any = {last: value}
    for part in reversed(above):
        inner = [inner] if isinstance(part, int) else {part: inner}
    return inner


def without(values: Any, path: Any) -> Any:
    """The values less that key, and less what was left empty by it."""
    values = deepcopy(values)
    for end in range(len(path), 0, -1):
        holder = values
        for part in path[: end - 1]:
            holder = child(holder, part)
        part = path[end - 1]
        if isinstance(holder, dict) and (end == len(path) or holder.get(part) in ({}, [], [{}], {"type": "lora"})):
            holder.pop(part, None)
    return values
