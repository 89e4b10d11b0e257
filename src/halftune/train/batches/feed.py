"""Global batches in a fixed order: the same rows in every step, however they are split over processes.

A thread collates the next batch while the present one is used.
"""

from __future__ import annotations

import hashlib
import math
import queue
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from halftune.config.run import RunConfig
from halftune.core.errors import DataError
from halftune.data.batch import LABEL_POSITIONS, WEIGHT, Batch, collate, without_labels
from halftune.data.order.cache import ordered
from halftune.data.order.epoch import (
    BatchOrder,
    BatchRule,
    Row,
    Span,
    by_length,
    epoch_rows,
    packed_batches,
    padded_batches,
)
from halftune.data.order.split import reserved
from halftune.data.pipeline import TokenizedSplit
from halftune.data.store import NO_LABEL, Example
from halftune.methods import Method
from halftune.plan import BatchPlan

if TYPE_CHECKING:
    from halftune.data.media.processor import MediaProcessor

T = TypeVar("T")
_END = object()
_PATIENCE = 0.1  # seconds between two looks at whether anybody still wants the item


def prefetched(made: Iterator[T]) -> Iterator[T]:
    """The items of ``made``, each made by a thread while the one before is used.

    One finished item waits at most. What ``made`` raises is raised here, after the items before it. Whoever leaves
    early, by closing the iterator or letting go of it, stops the thread before going on.
    """
    waiting: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=1)
    left = threading.Event()
    thread = threading.Thread(target=_work, args=(made, waiting, left), name="halftune-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = waiting.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        left.set()
        thread.join()


def _work(made: Iterator[Any], waiting: queue.Queue[tuple[Any, BaseException | None]], left: threading.Event) -> None:
    try:
        for item in made:
            _hand_over(item, None, waiting, left)
            if left.is_set():
                return
        _hand_over(_END, None, waiting, left)
    except BaseException as error:  # re-raised in the thread that asked
        _hand_over(_END, error, waiting, left)


def _hand_over(item: Any, error: BaseException | None, waiting: queue.Queue[Any], left: threading.Event) -> None:
    while not left.is_set():
        try:
            return waiting.put((item, error), timeout=_PATIENCE)
        except queue.Full:
            continue


@dataclass(frozen=True)
class Feed:
    """Where the micro-batches of one process come from.

    A step's global batch is ``micro_batch × accumulation × world_size`` rows of the epoch's order, or as many as
    ``tokens_per_batch × accumulation × world_size`` tokens hold; the last one of an epoch may be smaller. The position
    in the data is the number of steps done and nothing else.

    Attributes:
        split: tokenised samples.
        config, batch: how rows are made.
        method: weighs examples.
        pad_token_id: fills up rows of a padded batch.
        rank, world_size: which share of each global batch this process gets.
        device: a GPU that batches are made ahead for and copied to; None makes them when they are asked for.
        evaluation: no random order, the longest samples first.
        samples: int64, the samples of an evaluation set; None for the whole split.
        images: makes the model's inputs from images; None for text.
    """

    split: TokenizedSplit
    config: RunConfig
    batch: BatchPlan
    method: Method
    pad_token_id: int
    rank: int = 0
    world_size: int = 1
    device: torch.device | None = None
    evaluation: bool = False
    samples: np.ndarray | None = field(default=None, repr=False, compare=False)
    images: MediaProcessor | None = None
    _known: dict[int, BatchOrder] = field(default_factory=dict, init=False, repr=False, compare=False)
    _counts: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def packing(self) -> bool:
        """Whether rows are packed; prompts are not, but answers to them may be."""
        return self.batch.packing.value and not self.config.method.generates

    def for_evaluation(self, split: TokenizedSplit, rows: int | None) -> Feed:
        """A feed of an evaluation split; ``rows`` of a forward pass, or as in training."""
        batch = self.batch if rows is None else replace(self.batch, micro_batch=rows, tokens_per_batch=None)
        return replace(self, split=split, batch=batch, evaluation=True)

    @cached_property
    def sets(self) -> dict[str, Feed]:
        """The feeds of the evaluation sets, by name; ``""`` has the samples of none."""
        return {name: replace(self, samples=samples) for name, samples in self.split.sets.items()} or {"": self}

    def rows(self, epoch: int) -> list[Row]:
        """Rows of samples of one epoch, in order."""
        return [row for batch in self.batches(epoch) for row in batch]

    def batches(self, epoch: int) -> BatchOrder:
        """Global batches of one epoch, in order; those of the epoch last asked for are kept."""
        if epoch not in self._known:
            self._known.clear()
            self._known[epoch] = self._batches(epoch) if self.samples is None else self._set_batches(self.samples)
        return self._known[epoch]

    def _batches(self, epoch: int, chosen: np.ndarray | slice = slice(None)) -> BatchOrder:
        data, seed, segments = self.config.data, self.config.training.seed, self.config.method.segments
        lengths, longest, cache = self.split.lengths[chosen], self.split.longest[chosen], data.cache
        if self.packing:
            rule = {"packing": True, "capacity": data.max_length * segments, "split": data.packing.split}
            sizes = lengths if self.evaluation else reserved(lengths, self.config)
            rows = ordered(epoch_rows, sizes, cache=cache, epoch=epoch, seed=seed, **rule)
            if sizes is not lengths:
                rows = replace(rows, stops=lengths[rows.samples])
            return packed_batches(rows, self.rows_per_step)
        if self.evaluation:
            return ordered(by_length, longest, cache=cache, rule=self._rule)
        return ordered(padded_batches, longest, cache=cache, rule=self._rule, epoch=epoch, seed=seed)

    def _set_batches(self, samples: np.ndarray) -> BatchOrder:
        order = self._batches(0, samples)
        return replace(order, rows=replace(order.rows, samples=samples[order.rows.samples]))

    @property
    def _rule(self) -> BatchRule:
        tokens, segments = self.batch.tokens_per_batch, self.config.method.segments
        # Compared by rows, which stay the same if a run resumes with fewer tokens and more forward passes.
        rows = 1 if tokens is None else max(1, tokens // (segments * self.config.data.max_length))
        return BatchRule(self.rows_per_step, tokens, self.rows_per_step // rows, self.batch.grouped.value, segments)

    @property
    def rows_per_step(self) -> int:
        """Rows of a global batch; with ``tokens_per_batch`` those of ``max_length``."""
        return self.batch.micro_batch * self.batch.accumulation * self.world_size

    def fingerprint(self) -> str:
        """Identifies the samples: all lengths, all numbers of labels, and the tokens of 64 samples over the set."""
        digest = hashlib.sha256(self.split.lengths.tobytes() + self.split.trained.tobytes())
        if self.config.method.segments > 1:
            digest.update(self.split.longest.tobytes())
        for index in range(0, len(self.split), max(1, len(self.split) // 64)):
            for segment in self.split.example(index).segments:
                digest.update(segment.input_ids.tobytes())
            digest.update(self.split.digests(index))
        return digest.hexdigest()

    def order(self) -> str:
        """Identifies the first epoch: the order and packing of its rows and their split into steps."""
        digest = hashlib.sha256()
        for batch in self.batches(0):
            for row in batch:
                digest.update(np.asarray(row, dtype=np.int64).tobytes() + b"|")
            digest.update(b"\n")
        return digest.hexdigest()

    def place(self, step: int) -> dict[str, Any] | None:
        """Where the data was after a step, JSON-able; None where the number of the step says it all."""
        return None

    def resume(self, step: int, place: dict[str, Any] | None) -> None:
        """Begin after a step at the place that :meth:`place` gave."""

    def steps_in(self, epoch: int) -> int:
        """Optimizer steps of one epoch: the same in each, unless batches are as many rows as fit."""
        fixed = self.packing or self.batch.tokens_per_batch is None
        key = 0 if fixed else epoch
        if key not in self._counts:
            self._counts[key] = len(self.batches(key))
        return self._counts[key]

    def total_steps(self) -> int:
        """Optimizer steps of the whole run: ``max_steps``, else all of ``num_train_epochs`` (a fraction counts)."""
        training = self.config.training
        if training.max_steps is not None:
            return training.max_steps
        whole, part = int(training.num_train_epochs), training.num_train_epochs % 1
        steps = sum(self.steps_in(epoch) for epoch in range(whole))
        return max(1, steps + (math.ceil(self.steps_in(whole) * part) if part else 0))

    def steps(self, first_step: int, total_steps: int) -> Generator[tuple[float, list[Batch]]]:
        """Yields, for each step, the epoch reached after it and this process's micro-batches. Close it."""
        return self._ahead(self._steps(first_step, total_steps))

    def once(self) -> Generator[list[Batch]]:
        """This process's micro-batches of the first epoch, one global batch after the other. Close it."""
        return (batches for _, batches in self._ahead((0.0, self.micro_batches(rows)) for rows in self.batches(0)))

    def _ahead(self, made: Generator[tuple[float, list[Batch]]]) -> Generator[tuple[float, list[Batch]]]:
        """Where there is a GPU: made by a thread while the batch before trains, and copied there."""
        if self.device is None:
            return made
        ready = ((epoch, [batch.pinned() for batch in batches]) for epoch, batches in made)
        device = self.device
        return ((epoch, [batch.to(device) for batch in batches]) for epoch, batches in prefetched(ready))

    def _steps(self, first_step: int, total_steps: int) -> Generator[tuple[float, list[Batch]]]:
        step, epoch = 0, 0
        while step < total_steps:
            in_epoch = self.steps_in(epoch)
            positions = range(max(first_step - step, 0), min(in_epoch, total_steps - step))
            for position in positions:
                yield epoch + (position + 1) / in_epoch, self.micro_batches(self.batches(epoch)[position])
            step, epoch = step + in_epoch, epoch + 1

    def micro_batches(self, rows: list[Row]) -> list[Batch]:
        """This process's share of a global batch.

        Neighbours in length go to the same forward pass, and forward passes of like length to the processes at one
        time. Every process gets equally many: one that has run out of rows is given a row without labels, which costs a
        forward pass and changes nothing.
        """
        mine, size = rows[self.rank :: self.world_size], self._rows_per_forward(rows)
        count = math.ceil(math.ceil(len(rows) / self.world_size) / size)
        batches = [self._collate(mine[i * size : (i + 1) * size]) for i in range(math.ceil(len(mine) / size))]
        batches += [self._collate(rows[-1:], blank=True) for _ in range(count - len(batches))]
        return batches

    def _rows_per_forward(self, rows: list[Row]) -> int:
        if self.packing or self.batch.tokens_per_batch is None:
            return self.batch.micro_batch
        tokens = self.batch.tokens_per_batch * self._rule.forwards // (self.batch.accumulation * self.world_size)
        return self._rule.rows_of(tokens, rows[0][0].stop)

    def _collate(self, rows: list[Row], *, blank: bool = False) -> Batch:
        spans = [span for row in rows for span in row]
        examples = [self._part(span) for span in spans]
        weights = [self.method.weight(example) for example in examples]
        columns = {name: torch.tensor([one.columns[name] for one in examples]) for name in examples[0].columns}
        samples = [span.sample for span in spans]
        made = self.batch_of(examples, weights, columns, samples, packed=self.packing)
        if not self.config.method.generates:  # the model is asked for answers to prompts, and fed with those
            made = self.with_media(made, samples, examples)
        return without_labels(made) if blank else made

    def batch_of(
        self,
        examples: Sequence[Example],
        weights: Sequence[float],
        columns: Mapping[str, torch.Tensor],
        samples: Sequence[int],
        *,
        packed: bool,
    ) -> Batch:
        """A batch of E examples with its counts, without images.

        Args:
            examples: with labels; answers of the model take the place of those in the data.
            weights: of each.
            columns: besides the weights.
            samples: their indices in the split.
            packed: in one row.
        """
        made = collate(examples, self.pad_token_id, packed=packed)
        predicted = made.tokens["labels"][:, 1:] != NO_LABEL
        return replace(
            made,
            extras={**made.extras, LABEL_POSITIONS: predicted.any(dim=0).nonzero().squeeze(1)},
            columns={**columns, WEIGHT: torch.tensor(weights)},
            weight=sum(weights),
            fed=made.tokens["labels"].numel(),
            real=sum(len(segment.input_ids) for example in examples for segment in example.segments),
            trained=int(predicted.sum()),
            examples=tuple(samples),
        )

    def with_media(self, made: Batch, samples: Sequence[int], examples: Sequence[Example]) -> Batch:
        """The batch with the media of its segments, in the order of their placeholders; itself in a run on text.

        Raises:
            DataError: an image is damaged, or changed since it was tokenised; names the rows.
        """
        if self.images is None:
            return made
        from halftune.data.media.inputs import add_media  # few runs have images

        owned = [(sample, one) for sample, example in zip(samples, examples, strict=True) for one in example.segments]
        where = lambda bad: self.split.where(owned[index][0] for index in bad)  # noqa: E731
        return add_media(made, [segment for _, segment in owned], self.images, where)

    def where(self, batches: Sequence[Batch]) -> str:
        """The rows of the data that micro-batches were made of, as a clause; empty where they hold none."""
        return self.split.where(sample for batch in batches for sample in batch.examples)

    def _part(self, span: Span) -> Example:
        try:
            return self.split.part(span)
        except (OSError, ValueError, IndexError) as error:
            raise DataError(
                f"{self._named(span.sample)} can no longer be read: {error}",
                where="the cache of tokenised data",
                remedy="start the run again; it tokenises the data again",
                code="data.changed_during_run",
            ) from error

    def _named(self, sample: int) -> str:
        try:
            return f"sample {sample}, made of {self.split.where([sample])},"
        except (OSError, ValueError, IndexError):  # what is damaged may be where it came from
            return f"sample {sample}"
