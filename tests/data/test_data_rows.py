"""Packing, order, mixture and batches."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from halftune.core.errors import DataError
from halftune.data.batch import collate
from halftune.data.order.epoch import Span, epoch_rows
from halftune.data.order.packing import best_fit_decreasing
from halftune.data.order.split import TokenizedSplit, choose_rows, hold_out, weigh, without_copies
from halftune.data.store import NO_LABEL, Example, Segment, build_store


def fill(lengths, capacity):
    return [sum(lengths[item] for item in items) for items in bins(lengths, capacity)]


def bins(lengths, capacity):
    items, offsets = best_fit_decreasing(lengths, capacity)
    return [items[start:end].tolist() for start, end in pairwise(offsets.tolist())]


def test_best_fit_decreasing():
    assert sorted(fill([5, 3, 8, 2, 7, 1], 10), reverse=True) == [10, 10, 6]
    assert fill([10, 10, 1], 10) == [10, 10, 1]
    assert fill([], 10) == []
    with pytest.raises(ValueError, match="1 to 10"):
        best_fit_decreasing([11], 10)


def naive(lengths, capacity):
    """The definition, item by item."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        fitting = [index for index in range(len(bins)) if room[index] >= lengths[item]]
        if fitting:
            index = min(fitting, key=lambda index: room[index])
        else:
            index = len(bins)
            bins.append([])
            room.append(capacity)
        bins[index].append(item)
        room[index] -= lengths[item]
    return sorted(room)


@pytest.mark.parametrize("seed", range(20))
def test_packing_is_the_definition(seed):
    random = np.random.default_rng(seed)
    capacity = int(random.integers(1, 60))
    lengths = random.integers(1, capacity + 1, size=int(random.integers(1, 200))).tolist()
    packed = bins(lengths, capacity)
    assert sorted(item for items in packed for item in items) == list(range(len(lengths)))
    assert sorted(capacity - sum(lengths[item] for item in items) for items in packed) == naive(lengths, capacity)


def test_a_million_lengths():
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(5, 1, size=1_000_000).astype(int) + 1, 4096)
    offsets = best_fit_decreasing(lengths, 4096)[1]
    assert lengths.sum() / (4096 * (len(offsets) - 1)) > 0.99


LENGTHS = np.random.default_rng(1).integers(1, 33, size=300).astype(np.int32)


@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_shows_every_sample_once_in_an_order_of_its_own(packing):
    def rows(epoch, seed=7):
        return epoch_rows(LENGTHS, epoch=epoch, seed=seed, packing=packing, capacity=32)

    assert sorted(span for row in rows(0) for span in row) == [(i, 0, n) for i, n in enumerate(LENGTHS.tolist())]
    assert rows(0) == rows(0)
    assert rows(0) != rows(1)
    assert rows(0) != rows(0, seed=8)
    assert all(type(value) is int for row in rows(0) for span in row for value in span)
    if packing:
        lengths_of_rows = [sum(span.stop for span in row) for row in rows(0)]
        assert max(lengths_of_rows) <= 32
        assert lengths_of_rows != sorted(lengths_of_rows, reverse=True)  # full rows are not all in front
    else:
        assert {len(row) for row in rows(0)} == {1}


def test_split_fills_every_row():
    rows = epoch_rows(LENGTHS, epoch=0, seed=7, packing=True, capacity=50, split=True)
    seen: Counter[int] = Counter()
    for row in rows:
        assert sum(span.stop - span.start for span in row) == 50 or row == rows[-1]
        for span in row:
            assert span.start == seen[span.sample]  # in order and without a gap
            seen[span.sample] = span.stop
    assert dict(seen) == dict(enumerate(LENGTHS.tolist()))
    assert any(span.start > 0 for row in rows for span in row)


def test_a_span_is_that_part_of_the_sample():
    one, other = sample(*range(5)), sample(*range(10, 17), prompt=3)
    store = build_store([one, other], [(0, 3), (0, 7)], [("x.jsonl", "line")])
    split = TokenizedSplit([store], np.array([1, 0]))
    part = split.part(Span(0, 2, 4)).segments[0]
    assert (part.input_ids.tolist(), part.labels.tolist()) == ([12, 13], [NO_LABEL, 13])
    assert (
        split.part(Span(1, 0, 5)).segments[0].input_ids.tolist()
        == split.example(1).segments[0].input_ids.tolist()
        == [0, 1, 2, 3, 4]
    )


def test_weights_repeat_and_thin_out():
    shown = weigh([np.arange(10), np.arange(10, 20), np.arange(20, 30)], [2, 0.5, 1.3], seed=0)
    counts = Counter(shown.tolist())
    assert [counts[index] for index in range(10)] == [2] * 10
    assert sum(counts[index] for index in range(10, 20)) == 5
    assert sum(counts[index] for index in range(20, 30)) == 13
    assert max(counts.values()) == 2
    assert (shown == weigh([np.arange(10), np.arange(10, 20), np.arange(20, 30)], [2, 0.5, 1.3], seed=0)).all()


def test_sample_counts_and_held_out_shares():
    assert choose_rows(5, None, seed=0).tolist() == [0, 1, 2, 3, 4]
    assert choose_rows(5, 9, seed=0).tolist() == [0, 1, 2, 3, 4]
    assert len(set(choose_rows(100, 10, seed=0))) == 10
    assert set(choose_rows(100, 10, seed=0)) < set(choose_rows(100, 20, seed=0))
    kept, held = hold_out(np.arange(100), 0.1, seed=0)
    assert (len(kept), len(held)) == (90, 10)
    assert sorted([*kept, *held]) == list(range(100))
    assert len(hold_out(np.arange(100), 7, seed=0)[1]) == 7
    assert len(hold_out(np.arange(3), 0.01, seed=0)[1]) == 1
    with pytest.raises(DataError, match="there are only 3"):
        hold_out(np.arange(3), 3, seed=0)


def test_copies_are_held_out_together():
    content = np.array([0, 1, 0, 2, 3, 1, 0, 4])
    for seed in range(10):
        kept, held = hold_out(content, 2, seed=seed)
        assert len(set(content[held])) == len(held) == 2
        assert set(content[kept]) == set(range(5)) - set(content[held])
        assert [position for position in range(8) if content[position] not in content[held]] == kept.tolist()
    with pytest.raises(DataError, match=r"hold 5 samples out, and there are only 5 different ones \(8 with copies\)"):
        hold_out(content, 5, seed=0)


def sample(*ids, prompt=1):
    array = np.array(ids, dtype=np.int32)
    return Example((Segment(array, np.arange(len(ids)) >= prompt),))


def test_padded_batches():
    batch = collate([sample(5, 6, 7), sample(*range(10, 19))], 99, packed=False).tokens
    assert batch["input_ids"].tolist() == [[5, 6, 7, *[99] * 13], [*range(10, 19), *[99] * 7]]
    assert batch["attention_mask"].tolist() == [[1] * 3 + [0] * 13, [1] * 9 + [0] * 7]
    assert batch["labels"].tolist() == [[-100, 6, 7, *[-100] * 13], [-100, *range(11, 19), *[-100] * 7]]
    assert {str(tensor.dtype) for tensor in batch.values()} == {"torch.int64"}


def test_packed_batches():
    pair = Example((*sample(1, 1).segments, *sample(2, 2, 2, prompt=0).segments))
    made = collate([pair, sample(3, prompt=0), sample(4, 4, prompt=0), sample(5, 5, 5, prompt=0)], 99, packed=True)
    assert made.segment_of_example.tolist() == [0, 0, 1, 2, 3]
    batch = {**made.tokens, **made.extras}
    # the segments, then what fills the row up to a multiple of 8
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 5, 6, 8, 11, 16]
    assert batch["cu_seq_lens_k"].tolist() == batch["cu_seq_lens_q"].tolist()
    assert batch["max_length_q"] == batch["max_length_k"] == 5
    assert batch["input_ids"].tolist() == [[1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5, *[99] * 5]]
    assert batch["labels"].tolist() == [[-100, 1, -100, 2, 2, -100, -100, 4, -100, 5, 5, *[-100] * 5]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch["seq_idx"].tolist() == [[0, 0, 1, 1, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 5]]
    assert "attention_mask" not in batch
    dtypes = {name: str(tensor.dtype) for name, tensor in batch.items() if not isinstance(tensor, int)}
    assert dtypes["cu_seq_lens_q"] == dtypes["seq_idx"] == "torch.int32"
    assert dtypes["input_ids"] == dtypes["labels"] == dtypes["position_ids"] == "torch.int64"


def test_a_packed_row_without_a_tail():
    batch = collate([sample(*range(8))], 99, packed=True).extras
    assert batch["cu_seq_lens_q"].tolist() == [0, 8]
    assert batch["max_length_q"] == 8


def test_copies_are_left_out_across_sources():
    def one(ids, label, **columns):
        return Example((Segment(np.array(ids, np.int32), np.array([False, label])),), columns)

    first = [one([1, 2], True), one([1, 2], True), one([3, 4], True)]
    second = [one([3, 4], True), one([3, 4], False), one([5, 6], True)]
    places = [np.zeros((3, 2), np.int32)] * 2
    stores = [build_store(part, at, ()) for part, at in zip((first, second), places, strict=True)]
    ranges = without_copies(stores, [np.arange(3), np.arange(3, 6)])
    assert [part.tolist() for part in ranges] == [[0, 2], [4, 5]]
