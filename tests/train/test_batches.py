"""Global batches: packed or padded, by rows or tokens, split in any way, the same samples and the same loss."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from patience import until

from halftune.core.errors import DataError
from halftune.data.batch import Batch, collate
from halftune.data.order.epoch import BatchRule, Row, by_length, padded_batches, round_up
from halftune.data.pipeline import prepare
from halftune.data.store import NO_LABEL, Example, Segment
from halftune.methods import make_method
from halftune.methods.sft import Sft
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.train.batches.feed import Feed, prefetched
from halftune.train.trainer import train
from halftune_kernels.arguments import on_host

LENGTHS = np.random.default_rng(3).lognormal(4.5, 0.7, 3000).astype(int).clip(8, 512).astype(np.int32)


def padding(batches: list, rows: int) -> float:
    fed = real = 0
    for batch in batches:
        for start in range(0, len(batch), rows):
            part = [row[0].stop for row in batch[start : start + rows]]
            fed, real = fed + round_up(max(part)) * len(part), real + sum(part)
    return 1 - real / fed


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("tokens", [None, 2048])
def test_an_epoch_shows_every_sample_once_in_an_order_of_its_own(grouped: bool, tokens: int | None) -> None:
    rule = BatchRule(16, tokens, 4, grouped)

    def batches(epoch: int, seed: int = 7) -> list:
        return padded_batches(LENGTHS, rule, epoch=epoch, seed=seed)

    one = batches(0)
    spans = sorted(row[0] for batch in one for row in batch)
    assert spans == [(index, 0, size) for index, size in enumerate(LENGTHS.tolist())]
    assert one == batches(0) != batches(1)
    assert one != batches(0, seed=8)
    for batch in one:
        sizes = [row[0].stop for row in batch]
        assert sizes == sorted(sizes, reverse=True)
        if tokens is not None:
            each = -(-len(batch) // 4)
            assert each * round_up(sizes[0]) <= tokens
    if tokens is None:
        assert Counter(map(len, one)) == {16: 187, 8: 1}


def test_groups_cut_padding_and_their_batches_come_in_random_order() -> None:
    random, grouped = (padded_batches(LENGTHS, BatchRule(16, grouped=on), epoch=1, seed=0) for on in (False, True))
    assert padding(grouped, 4) < 0.05 < 0.2 < padding(random, 4)
    longest = [batch[0][0].stop for batch in grouped]
    neighbours = np.corrcoef(longest[:-1], longest[1:])[0, 1]
    assert abs(neighbours) < 0.2
    # Most of a sample's 15 companions are others in the next epoch.
    following = padded_batches(LENGTHS, BatchRule(16, grouped=True), epoch=2, seed=0)
    companions = [{row[0].sample: {other[0].sample for other in batch} for batch in epoch for row in batch}
                  for epoch in (grouped, following)]  # fmt: skip
    shared = np.mean([len(companions[0][index] & companions[1][index]) - 1 for index in range(len(LENGTHS))])
    assert shared < 4


def test_the_longest_forward_pass_opens_the_first_epoch_only() -> None:
    first, second = (padded_batches(LENGTHS, BatchRule(16, grouped=True), epoch=epoch, seed=0) for epoch in (0, 1))
    assert first[0][0][0].stop == LENGTHS.max()
    assert second[0][0][0].stop < LENGTHS.max()


def test_tiny_sets_make_batches() -> None:
    for count in range(7):
        for rule in (BatchRule(4, grouped=True), BatchRule(4, 64, 2, True)):
            batches = padded_batches(np.full(count, 9), rule, epoch=0, seed=0)
            assert sorted(row[0].sample for batch in batches for row in batch) == list(range(count))
            assert all(batches)
            assert by_length(np.full(count, 9), rule) == [] or count


def feed_of(recipe: Any, *overrides: str) -> Feed:
    loaded, made = recipe(*overrides)
    tokenizer = load_tokenizer(loaded.run.model)
    split = prepare(loaded.run, tokenizer).train
    return Feed(split, loaded.run, made.batch, make_method(loaded.run.method), int(tokenizer.pad_token_id))


def labels_of(batches: list[Batch]) -> Counter:
    """How often each labelled token is trained."""
    found: Counter = Counter()
    for batch in batches:
        labels = batch.tokens["labels"]
        assert isinstance(labels, torch.Tensor)
        found.update(labels[:, 1:][labels[:, 1:] != NO_LABEL].tolist())
    return found


TOKENS = ("training.per_device_train_batch_size=null", "training.tokens_per_batch=384")


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.gradient_accumulation_steps=2",),
        ("training.gradient_accumulation_steps=2", *TOKENS),
        ("training.gradient_accumulation_steps=2", *TOKENS, "data.group_by_length=false"),
        ("training.gradient_accumulation_steps=2", "data.packing=true", "training.per_device_train_batch_size=2"),
    ],
    ids=["rows", "tokens", "tokens ungrouped", "packed"],
)
def test_the_split_of_a_global_batch_changes_nothing_but_the_split(recipe: Any, overrides: tuple[str, ...]) -> None:
    """One process with two forward passes, two with one, and, as after running out of memory, four half as large."""
    one = feed_of(recipe, *overrides)
    size, passes = one.batch.micro_batch, one.batch.accumulation
    two = [replace(one, rank=rank, world_size=2, batch=replace(one.batch, accumulation=1)) for rank in (0, 1)]
    half = replace(one, batch=replace(one.batch, micro_batch=size // 2, accumulation=2 * passes))
    assert one.batches(0) == two[0].batches(0) == two[1].batches(0) == half.batches(0)
    assert one.rows_per_step == two[0].rows_per_step == half.rows_per_step
    seen = []
    for rows in one.batches(0):
        whole = one.micro_batches(rows)
        shares = [feed.micro_batches(rows) for feed in two]
        assert len(shares[0]) == len(shares[1])  # processes wait for each other
        smaller = half.micro_batches(rows)
        assert labels_of(whole) == labels_of(shares[0] + shares[1]) == labels_of(smaller)
        assert sum(batch.trained for batch in whole) == sum(batch.trained for batch in smaller)
        budget = one.batch.tokens_per_batch
        if budget is not None:
            assert max(batch.fed for batch in whole) <= budget
            assert max(batch.fed for batch in smaller) <= max(budget // 2, round_up(96))
        seen += [span.sample for row in rows for span in row]
    assert sorted(seen) == list(range(96))


def test_a_token_budget_is_used(recipe: Any) -> None:
    feed = feed_of(recipe, *TOKENS)
    fed = [batch.fed for rows in feed.batches(0)[:-1] for batch in feed.micro_batches(rows)]
    assert np.mean(fed) > 0.8 * 384
    assert len({len(rows) for rows in feed.batches(0)}) > 1


def test_steps_are_the_position_in_the_data(recipe: Any) -> None:
    feed = feed_of(recipe, *TOKENS, "training.max_steps=null", "training.num_train_epochs=3")
    total = feed.total_steps()
    everything = [(epoch, labels_of(batches)) for epoch, batches in feed.steps(0, total)]
    assert len(everything) == total == sum(feed.steps_in(epoch) for epoch in range(3))
    assert everything[-1][0] == 3.0
    later = [(epoch, labels_of(batches)) for epoch, batches in replace(feed).steps(total // 2, total)]
    assert later == everything[total // 2 :]


def test_an_order_is_worked_out_once(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from halftune.train.batches import feed as module

    feed = feed_of(recipe, "data.packing=true", "training.per_device_train_batch_size=1")
    calls = []
    original = module.epoch_rows
    monkeypatch.setattr(module, "epoch_rows", lambda *a, **k: calls.append(k["epoch"]) or original(*a, **k))
    evaluation = replace(feed, evaluation=True)
    for _ in range(3):
        assert sum(batch.trained for batches in evaluation.once() for batch in batches) > 0
    assert feed.total_steps() > 0
    list(replace(feed).steps(0, 2 * len(feed.batches(0))))
    assert Counter(calls) == {0: 4, 1: 1} or calls.count(1) == 1


def test_evaluation_is_the_same_whatever_the_batches(recipe: Any, tmp_path: Path) -> None:
    found = []
    for overrides in ((), ("data.packing=true", "training.per_device_train_batch_size=1"), TOKENS):
        folder = tmp_path / str(len(found))
        settings = ("training.max_steps=1", "training.learning_rate=1e-12", "data.eval_split=20")
        train(*recipe(*overrides, *settings, f"training.output_dir={folder}"))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found.append(next(line["eval_loss"] for line in lines if "eval_loss" in line))
    assert max(found) - min(found) < 1e-5 * min(found)


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "split"), [("lora", "true"), ("lora", "false"), ("none", "true")])
def test_packed_and_padded_curves_are_one(
    recipe: Any, losses: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adapter: str, split: str
) -> None:
    """The same samples in each optimizer step, once in packed rows with accumulation, once padded."""
    common = ("training.max_steps=10", "training.learning_rate=2e-3", "training.weight_decay=0.01")
    common += ("adapter=none",) if adapter == "none" else ()
    settings = (
        f"data.packing={{enabled: true, split: {split}}}",
        *("training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=3"),
        f"training.output_dir={tmp_path}/packed",
    )
    packed = losses(train(*recipe(*common, *settings)).folder)
    order = feed_of(recipe, *common, *settings)
    steps = {epoch: order.batches(epoch) for epoch in range(3)}

    def same_samples(self: Feed, epoch: int) -> list[list[Row]]:
        spans = [[span for row in rows for span in row] for rows in steps[epoch]]
        return [[(span,) for span in sorted(step, key=lambda span: span.start - span.stop)] for step in spans]

    with monkeypatch.context() as patch:
        padded_recipe = recipe(*common, f"training.output_dir={tmp_path}/padded")
        patch.setattr(Feed, "_batches", same_samples)
        padded = losses(train(*padded_recipe).folder)
    assert len(packed) == len(padded) == 10
    assert max(abs(a - b) / b for a, b in zip(packed, padded, strict=True)) < 1e-4


def test_prefetched_is_the_same_in_the_same_order() -> None:
    assert list(prefetched(iter(range(50)))) == list(range(50))
    assert list(prefetched(iter([]))) == []


def test_prefetching_is_one_ahead_and_stops_with_who_uses_it() -> None:
    made: list[int] = []

    def source() -> Any:
        for number in range(1000):
            made.append(number)
            yield number

    items = prefetched(source())
    assert next(items) == 0
    until(lambda: len(made) == 3, "one in use, one waiting, one in the making")
    time.sleep(0.2)  # for one too many
    assert len(made) == 3
    items.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "halftune-prefetch"]
    assert len(made) == 3


def test_an_error_comes_after_what_was_made_before_it() -> None:
    def source() -> Any:
        yield 1
        raise DataError("broken", where="row 2", code="data.malformed_row")

    items = prefetched(source())
    assert next(items) == 1
    with pytest.raises(DataError, match="row 2"):
        next(items)
    assert not [thread for thread in threading.enumerate() if thread.name == "halftune-prefetch"]


def test_a_sample_that_can_no_longer_be_read_is_named(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = feed_of(recipe)

    def gone(span: Any) -> Any:
        raise OSError("stale file handle")

    monkeypatch.setattr(feed.split, "part", gone)
    with pytest.raises(DataError, match=r"sample \d+, made of \S+ \w+ \d+, can no longer be read: stale"):
        next(feed.steps(0, 1))


def test_a_prefetching_feed_is_the_same_feed(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a device that is the CPU here: the thread and the copies, without page-locked memory."""
    monkeypatch.setattr(Batch, "pinned", lambda self: self)
    feed = feed_of(recipe, "training.gradient_accumulation_steps=2")
    ahead = replace(feed, device=torch.device("cpu"))
    for one, other in ((feed.steps(3, 14), ahead.steps(3, 14)), (feed.once(), ahead.once())):
        mine, theirs = list(one), list(other)
        assert len(mine) == len(theirs) > 1
        assert str(mine) == str(theirs)
    interrupted = ahead.steps(0, 100)
    next(interrupted)
    del interrupted  # as a loop that is left by an error or a break
    assert not [thread for thread in threading.enumerate() if thread.name == "halftune-prefetch"]


@pytest.mark.parametrize("where", ["loss", "evaluate"])
def test_no_thread_outlives_an_error(recipe: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(Batch, "pinned", lambda self: self)
    ahead = Feed._ahead
    monkeypatch.setattr(Feed, "_ahead", lambda self, made: ahead(replace(self, device=torch.device("cpu")), made))

    def broken(*_: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(Sft, where, broken)
    with pytest.raises(KeyError):
        train(*recipe("data.eval_split=16", "training.eval_steps=1", "training.per_device_eval_batch_size=4"))
    assert not [thread for thread in threading.enumerate() if thread.name == "halftune-prefetch"]


def test_no_sample_of_a_packed_row_is_predicted_from_the_one_before() -> None:
    """Neither the last one, where nothing fills the row up."""
    segments = [Segment(np.arange(size, dtype=np.int32) + 10, np.ones(size, bool)) for size in (3, 5)]
    batch = collate([Example((one,)) for one in segments], 0, packed=True)
    assert batch.tokens["input_ids"].tolist() == [[10, 11, 12, 10, 11, 12, 13, 14]]
    assert batch.tokens["labels"].tolist() == [[NO_LABEL, 11, 12, NO_LABEL, 11, 12, 13, 14]]
    assert batch.tokens["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    bounds = batch.extras["cu_seq_lens_q"]
    assert isinstance(bounds, torch.Tensor)
    assert (bounds.tolist(), batch.extras["max_length_q"]) == ([0, 3, 8], 5)


def test_a_batch_on_a_device_is_not_asked_for_its_boundaries() -> None:
    segments = [Segment(np.arange(length), np.ones(length, dtype=bool)) for length in (3, 5)]
    batch = collate([Example((one,)) for one in segments], 0, packed=True)
    there = batch.to(torch.device("meta"))
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert on_host(there.extras[name]) == (0, 3, 8)
