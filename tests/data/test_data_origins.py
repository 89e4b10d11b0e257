"""Every sample knows the file and the line that it was made of, from the cache too; damaged ones are refused."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halftune.data import store as stores
from halftune.data.order.split import SHOWN, TokenizedSplit, contents
from halftune.data.pipeline import prepare
from halftune.data.store import Example, Segment, StoreWriter, TokenStore, build_store, load_store

GOOD = json.dumps({"prompt": "a", "completion": "b"})
EMPTY = json.dumps({"prompt": "a", "completion": ""})


def origins(split: TokenizedSplit) -> list[str]:
    return [split.where([index]) for index in range(len(split))]


EXAMPLES = [
    Example((Segment(np.arange(5), np.arange(5) > 0),)),
    Example((Segment(np.arange(10, 17), np.arange(7) > 2),)),
]
ORIGINS, FILES = [(1, 3), (0, 7)], [("a.jsonl", "line"), ("b.csv", "row")]


@pytest.fixture
def store() -> TokenStore:
    return build_store(EXAMPLES, ORIGINS, FILES)


def saved(folder: Path) -> TokenStore:
    writer = StoreWriter(folder, FILES)
    writer.append(EXAMPLES, ORIGINS)
    return writer.finish()


@pytest.mark.parametrize("cache", [True, False])
def test_lines_are_those_of_the_file(
    cache: bool, tokenizer: Any, make_config: Any, write: Any, own_cache: Path
) -> None:
    """Blank lines count, dropped rows do not shift what follows, and the second time it comes from the cache."""
    path = write(f"{GOOD}\n\n{EMPTY}\n{GOOD}\n\n\n{GOOD}\n")
    for _ in range(2):
        split = prepare(make_config(path, cache=cache), tokenizer).train
        assert origins(split) == [f"{path} line {number}" for number in (1, 4, 7)]
    assert bool(list(own_cache.rglob("origins.npy"))) == cache


def test_files_of_a_folder_and_several_sources(tokenizer: Any, make_config: Any, write: Any, tmp_path: Path) -> None:
    first = write(f"{GOOD}\n{GOOD}\n", "folder/a.jsonl")
    second = tmp_path / "folder" / "b.jsonl.gz"
    second.write_bytes(gzip.compress(f"\n{GOOD}\n".encode()))
    third = write(f"[{GOOD}, {EMPTY}, {GOOD}]", "c.json")
    split = prepare(make_config([{"path": str(tmp_path / "folder")}, {"path": third}]), tokenizer).train
    assert origins(split) == [
        f"{first} line 1",
        f"{first} line 2",
        f"{second} line 2",
        f"{third} row 1",
        f"{third} row 3",
    ]
    assert split.where([3, 4, 0, 4]) == f"{third} row 1, 3; {first} line 1"  # files by name, each row once


def test_pieces_of_a_document_come_from_one_row(tokenizer: Any, make_config: Any, write: Any) -> None:
    path = write([{"text": "one"}, {"text": "many words " * 40}])
    split = prepare(make_config(path, method="pretrain", max_length=16), tokenizer).train
    assert len(split) > 3
    assert set(origins(split)[1:]) == {f"{path} line 2"}


def test_chosen_held_out_and_weighted_rows_keep_their_lines(tokenizer: Any, make_config: Any, write: Any) -> None:
    path = write([{"prompt": f"row {number}", "completion": "b"} for number in range(1, 31)])
    prepared = prepare(make_config({"path": path, "samples": 20, "weight": 1.5}, eval_split=5), tokenizer)
    assert prepared.eval is not None
    for split in (prepared.train, prepared.eval):
        for index in range(len(split)):
            text = tokenizer.decode(split.example(index).segments[0].input_ids)
            number = split.where([index]).rpartition(" ")[2]
            assert f"row {number}<" in text


def test_long_lists_are_cut(store: TokenStore) -> None:
    many = replace(store, origins=np.array([[0, number] for number in range(1, 101)], dtype=np.int32))
    many = replace(many, trained=np.zeros(100, np.int32), offsets=np.arange(101), firsts=np.arange(101))
    said = TokenizedSplit([many], np.arange(100)).where(range(100))
    assert said.endswith(f"{SHOWN} and {100 - SHOWN} more")


def test_a_saved_store_is_the_same(store: TokenStore, tmp_path: Path) -> None:
    loaded = saved(tmp_path)
    assert isinstance(loaded.origins, np.memmap)
    assert [loaded.origin(index) for index in range(2)] == [("b.csv", "row", 3), ("a.jsonl", "line", 7)]
    assert (loaded.files, loaded.highest) == (store.files, 16)
    np.save(tmp_path / "origins.npy", store.origins[:1])
    with pytest.raises(ValueError, match="different lengths"):
        load_store(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.npy")} == {*stores._MAPPED, *stores._READ}


def test_rows_of_prompts_are_kept_and_tell_examples_apart(tmp_path: Path) -> None:
    """The bytes that tell them apart are those which checkpoints of earlier versions have hashed."""
    rows = [{"a": "é", "n": [1, None]}, None, {}, {"a": "é", "n": [2, None]}]
    examples = [Example(EXAMPLES[0].segments, row=row) for row in rows]
    writer = StoreWriter(tmp_path, FILES)
    writer.append(examples[:1], ORIGINS[:1])
    writer.append(examples[1:], [ORIGINS[0]] * 3)
    for store in (build_store(examples, [ORIGINS[0]] * 4, FILES), writer.finish()):
        assert [store.example(index).row for index in range(4)] == rows
        assert [store.digests(index) for index in range(3)] == ['{"a": "é", "n": [1, null]}'.encode(), b"", b"{}"]
        assert contents([store]).tolist() == [0, 1, 2, 3]


def test_a_file_that_is_cut_under_the_run_is_said(tmp_path: Path) -> None:
    """Reading on would end the process with SIGBUS, without a word."""
    loaded = saved(tmp_path)
    path = tmp_path / "ids.npy"
    whole = path.stat().st_size
    os.truncate(path, whole - 1)
    with pytest.raises(ValueError, match=rf"ids.npy was truncated from {whole} to {whole - 1}"):
        loaded.example(0)
    os.truncate(path, whole)
    for another in (lambda: None, lambda: path.write_bytes(b"")):  # deleted, and made anew by somebody else
        path.unlink(missing_ok=True)
        another()
        assert len(loaded.example(0).segments)


def test_a_sample_that_is_not_what_was_written_is_refused(store: TokenStore) -> None:
    """As a flipped bit in memory or on disk would leave it, behind the check at the start of a run."""
    for value in (17, -1, 1 << 30):
        ids = store.ids.copy()
        ids[6] = value
        broken = replace(store, ids=ids)
        assert broken.example(0).segments[0].input_ids.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(ValueError, match=r"token ids .* out of range"):
            broken.example(1)
    for offsets in ([0, 5, 99], [0, -5, 12], [0, 0, 12]):
        broken = replace(store, offsets=np.array(offsets))
        with pytest.raises(ValueError, match=r"^tokens .* out of range"):
            [broken.example(index) for index in range(2)]
