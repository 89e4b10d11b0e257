"""Rows that are read while training: shares of processes, places, weights, errors."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest

from halftune.core.errors import DataError
from halftune.data.pipeline import prepare
from halftune.data.stream import TokenStream


def rows(count: int, name: str = "q") -> list[dict]:
    return [{"prompt": f"{name}{number}", "completion": "four " * (number % 5 + 1)} for number in range(count)]


@pytest.fixture
def stream(make_config, make_tokenizer):
    """Makes the stream of some sources."""

    def make(train, buffer: int = 16, **data) -> TokenStream:
        found = prepare(make_config(train, streaming={"enabled": True, "buffer": buffer}, **data), make_tokenizer())
        assert found.stream is not None
        return found.stream

    return make


def origins(buffers) -> list[tuple[str, int]]:
    """The file and line of each sample."""
    stores = [store for buffer in buffers for store in buffer.split._stores]
    return [(path, number) for store in stores for path, _, number in map(store.origin, range(len(store)))]


def tokens(buffer) -> list[int]:
    """The first and last sample."""
    places = (0, len(buffer.split) - 1)
    return [token for place in places for token in buffer.split.example(place).segments[0].input_ids.tolist()]


@pytest.mark.parametrize("files", [1, 2, 4])  # shares of rows, or of files
def test_processes_share_the_rows_and_nothing_twice(stream, write, tmp_path, files) -> None:
    for number in range(files):
        write(rows(64 // files), f"folder/{number}.jsonl")
    made = stream(str(tmp_path / "folder"))
    shares = [origins(islice(made.buffers(rank, 2, None), 2)) for rank in range(2)]
    assert [len(set(share)) for share in shares] == [32, 32]
    assert len({*shares[0], *shares[1]}) == 64


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_a_place_leads_to_the_same_rows(stream, write, tmp_path, processes, name) -> None:
    path = write(rows(50) if name.endswith(".jsonl") else json.dumps(rows(50)), name)
    if name.endswith(".parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows(50)), path)
    sources = [{"path": path, "weight": 2}, {"path": write(rows(7, "p"), "other.jsonl")}]
    whole = list(islice(stream(sources).buffers(processes - 1, processes, None), 12))  # several passes
    for start in (0, 1, 3, 8):
        place = json.loads(json.dumps(whole[start].place))
        again = list(islice(stream(sources).buffers(processes - 1, processes, place), 12 - start))
        assert [one.number for one in again] == list(range(start, 12))
        assert origins(again) == origins(whole[start:])
        assert [one.place for one in again] == [one.place for one in whole[start:]]
        assert [tokens(one) for one in again] == [tokens(one) for one in whole[start:]]


def test_sources_are_mixed_by_weight_and_begin_again(stream, write) -> None:
    sources = [{"path": write(rows(40), "a.jsonl"), "weight": 3}, {"path": write(rows(500, "b"), "b.jsonl")}]
    made = list(islice(stream(sources, buffer=100).buffers(0, 1, None), 10))
    taken = Counter(path.rsplit("/", 1)[-1] for path, _ in origins(made))
    assert taken.total() == 1000
    assert 690 < taken["a.jsonl"] < 810  # 750 ± 4.4 standard deviations
    assert made[-1].place["sources"][0]["pass"] > 10
    assert made[-1].place["sources"][1]["pass"] == 0


def test_tokens_are_those_of_the_whole_data(stream, make_config, make_tokenizer, write) -> None:
    path = write(rows(40))
    whole = prepare(make_config(path), make_tokenizer()).train
    (buffer,) = islice(stream(path, buffer=40).buffers(0, 1, None), 1)
    for index in range(40):
        (one,), (other,) = whole.example(index).segments, buffer.split.example(index).segments
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()


def test_a_later_row_that_is_malformed_names_its_line(stream, write) -> None:
    path = write([*rows(1200), {"prompt": "a", "completion": ["no text"]}])  # behind those that show the format
    with pytest.raises(DataError) as caught:
        list(islice(stream(path, buffer=256).buffers(0, 1, None), 5))
    assert caught.value.code == "data.malformed_row"
    assert caught.value.where == f"{path} line 1201"


def test_more_processes_than_rows(stream, write) -> None:
    made = stream(write(rows(3)))
    with pytest.raises(DataError) as caught:
        next(made.buffers(3, 4, None))
    assert caught.value.code == "data.empty"


def test_other_files_have_another_identity(stream, write) -> None:
    assert stream(write(rows(30), "a.jsonl")).fingerprint(2) == stream(write(rows(30), "a.jsonl")).fingerprint(2)
    prints = {
        stream(write(rows(30), "a.jsonl")).fingerprint(2),
        stream(write(rows(30), "a.jsonl")).fingerprint(4),
        stream(write(rows(30), "a.jsonl"), buffer=32).fingerprint(2),
        stream(write([*rows(29), {"prompt": "q30", "completion": "four"}], "a.jsonl")).fingerprint(2),
    }
    assert len(prints) == 4


def test_a_data_set_that_datasets_opens(stream, write, tmp_path, monkeypatch) -> None:
    """As one of the hub, from a folder: no hub is reached here."""
    for number in range(3):
        write(rows(20, f"{number}-"), f"org/{number}.jsonl")
    monkeypatch.setattr("halftune.data.stream.is_remote", lambda section: True)
    source = {"path": str(tmp_path / "org"), "split": "train"}
    whole = list(islice(stream(source, buffer=25).buffers(1, 2, None), 3))
    again = list(islice(stream(source, buffer=25).buffers(1, 2, json.loads(json.dumps(whole[1].place))), 2))
    assert [tokens(one) for one in again] == [tokens(one) for one in whole[1:]]
    assert whole[2].place["sources"][0]["pass"] == 1  # 30 of 60 rows are this process's
    assert stream(source).fingerprint(1) == stream(source).fingerprint(1)
    with pytest.raises(DataError) as caught:
        stream({**source, "split": "test"})
    assert caught.value.code == "data.not_found"
