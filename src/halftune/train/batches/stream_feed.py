"""Batches of rows that are read while training: each process packs and shuffles its own buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from halftune.data.batch import Batch
from halftune.data.order.split import TokenizedSplit
from halftune.data.stream import TokenStream
from halftune.train.batches.feed import Feed

_KEPT = 16  # steps whose places are known: more than are made ahead
_BUFFER = 1 << 32  # numbers of samples in a buffer; their buffer is above


@dataclass(frozen=True)
class StreamFeed(Feed):
    """As ``Feed``, for rows without end. A buffer takes the place of an epoch; its last batch may be smaller.

    Attributes:
        stream: the rows; ``split`` has the first ones only.
        check: raises if the model has no embedding for a token of a buffer.
        places: step → where the stream was after it, for the last few steps.
    """

    stream: TokenStream = field(kw_only=True, repr=False, compare=False)
    check: Callable[[TokenizedSplit], None] = field(kw_only=True, repr=False, compare=False)
    places: dict[int, dict[str, Any]] = field(default_factory=dict, kw_only=True, repr=False, compare=False)
    _buffers: dict[int, TokenizedSplit] = field(default_factory=dict, init=False, repr=False, compare=False)

    def for_evaluation(self, split: TokenizedSplit, rows: int | None) -> Feed:
        """An ordinary feed: an evaluation split is read whole."""
        given = {one.name: getattr(self, one.name) for one in fields(Feed) if one.init}
        return Feed(**given).for_evaluation(split, rows)

    def fingerprint(self) -> str:
        """Identifies the sources by their names, sizes, first and last bytes, and their shares."""
        return self.stream.fingerprint(self.world_size)

    def order(self) -> str:
        """The order depends on the rows that a process takes, which no process knows ahead."""
        return hashlib.sha256(f"{self.world_size} {self.batch.packing.value}".encode()).hexdigest()

    def steps_in(self, epoch: int) -> int:
        """The steps of the run: there are no epochs."""
        return self.total_steps()

    def place(self, step: int) -> dict[str, Any] | None:
        """Where the stream was after a step, JSON-able."""
        return self.places.get(step)

    def resume(self, step: int, place: dict[str, Any] | None) -> None:
        """Begin after a step at the place that :meth:`place` gave."""
        if place is not None:
            self.places[step] = place

    def where(self, batches: Sequence[Batch]) -> str:
        """The rows of the data that micro-batches were made of."""
        found: dict[int, list[int]] = {}
        for batch in batches:
            for sample in batch.examples:
                found.setdefault(sample // _BUFFER, []).append(sample % _BUFFER)
        known = ((self._buffers.get(number), samples) for number, samples in found.items())
        return "; ".join(split.where(samples) for split, samples in known if split is not None)

    def _steps(self, first_step: int, total_steps: int) -> Generator[tuple[float, list[Batch]]]:
        step, place = first_step, self.places.get(first_step)
        done = place["done"] if place else 0
        for buffer in self.stream.buffers(self.rank, self.world_size, place):
            self.check(buffer.split)
            self._buffers[buffer.number] = buffer.split
            self._buffers.pop(buffer.number - 2, None)
            alone = self._alone(buffer.split)
            for batch in alone._batches(buffer.number)[done:]:
                if step == total_steps:
                    return
                made = alone.micro_batches(batch)
                blank = [alone._collate(batch[-1:], blank=True)] * (self.batch.accumulation - len(made))
                step, done = step + 1, done + 1
                self.places[step] = {**buffer.place, "done": done}
                self.places.pop(step - _KEPT, None)
                yield step / total_steps, [_numbered(one, buffer.number) for one in (*made, *blank)]
            done = 0

    def _alone(self, split: TokenizedSplit) -> Feed:
        """This process's batches of one buffer."""
        given = {one.name: getattr(self, one.name) for one in fields(Feed) if one.init}
        return Feed(**{**given, "split": split, "rank": 0, "world_size": 1, "device": None})


def _numbered(batch: Batch, buffer: int) -> Batch:
    return replace(batch, examples=tuple(buffer * _BUFFER + sample for sample in batch.examples))
