"""Global batches in a fixed order: the same rows in every step, however they are split over processes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from halftune.config.run import RunConfig
from halftune.data.collate import collate
from halftune.data.order import Row, epoch_rows
from halftune.data.pipeline import TokenizedSplit
from halftune.data.sample import NO_LABEL
from halftune.plan import BatchPlan


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one process.

    Attributes:
        inputs: what the collator made (tensors on the CPU, and ints).
        tokens: fed tokens, padding included.
        tokens_real: without padding.
        tokens_trained: labels that are predicted (the first token of a row is predicted from nothing).
    """

    inputs: dict[str, torch.Tensor | int]
    tokens: int
    tokens_real: int
    tokens_trained: int


@dataclass(frozen=True)
class Feed:
    """Where the micro-batches of one process come from.

    A step's global batch is ``micro_batch × accumulation × world_size`` rows of the epoch's order; the last one of an
    epoch may be smaller. The position in the data is the number of steps done and nothing else.

    Attributes:
        split: tokenised samples.
        config, batch, packing: how rows are made.
        pad_token_id: fills up rows of a padded batch.
        rank, world_size: which share of each global batch this process gets.
    """

    split: TokenizedSplit
    config: RunConfig
    batch: BatchPlan
    packing: bool
    pad_token_id: int
    rank: int = 0
    world_size: int = 1

    def rows(self, epoch: int) -> list[Row]:
        """Rows of samples of one epoch, in order."""
        data = self.config.data
        return epoch_rows(
            self.split.lengths,
            epoch=epoch,
            seed=self.config.training.seed,
            packing=self.packing,
            capacity=data.max_length,
            split=data.packing.split,
        )

    @property
    def rows_per_step(self) -> int:
        """Rows of a global batch."""
        return self.batch.micro_batch * self.batch.accumulation * self.world_size

    def fingerprint(self) -> str:
        """Identifies the samples: all lengths, all numbers of labels, and the tokens of 64 samples over the set."""
        digest = hashlib.sha256(self.split.lengths.tobytes() + self.split.trained.tobytes())
        for index in range(0, len(self.split), max(1, len(self.split) // 64)):
            digest.update(self.split.sample(index).input_ids.tobytes())
        return digest.hexdigest()

    def steps_in(self, epoch: int) -> int:
        """Optimizer steps of one epoch."""
        return math.ceil(len(self.rows(epoch)) / self.rows_per_step)

    def total_steps(self) -> int:
        """Optimizer steps of the whole run: ``max_steps``, else all of ``num_train_epochs`` (a fraction counts)."""
        training = self.config.training
        if training.max_steps is not None:
            return training.max_steps
        whole, part = int(training.num_train_epochs), training.num_train_epochs % 1
        steps = sum(self.steps_in(epoch) for epoch in range(whole))
        return max(1, steps + (math.ceil(self.steps_in(whole) * part) if part else 0))

    def steps(self, first_step: int, total_steps: int) -> Iterator[tuple[float, list[MicroBatch]]]:
        """Yields, for each step, the epoch reached after it and this process's micro-batches."""
        step, epoch = 0, 0
        while step < total_steps:
            rows = self.rows(epoch)
            in_epoch = math.ceil(len(rows) / self.rows_per_step)
            for position in range(max(first_step - step, 0), min(in_epoch, total_steps - step)):
                chunk = rows[position * self.rows_per_step : (position + 1) * self.rows_per_step]
                yield epoch + (position + 1) / in_epoch, self.micro_batches(chunk)
            step, epoch = step + in_epoch, epoch + 1

    def micro_batches(self, rows: list[Row]) -> list[MicroBatch]:
        """This process's share of a global batch.

        Every process gets equally many: one that has run out of rows is given a row without labels, which costs a
        forward pass and changes nothing.
        """
        mine = rows[self.rank :: self.world_size]
        size = self.batch.micro_batch
        count = math.ceil(math.ceil(len(rows) / self.world_size) / size)
        batches = [self._collate(mine[i * size : (i + 1) * size]) for i in range(math.ceil(len(mine) / size))]
        batches += [self._collate(rows[:1], blank=True) for _ in range(count - len(batches))]
        return batches

    def _collate(self, rows: list[Row], *, blank: bool = False) -> MicroBatch:
        samples = [[self.split.part(span) for span in row] for row in rows]
        inputs = collate(samples, self.pad_token_id, packed=self.packing)
        ids, labels = inputs["input_ids"], inputs["labels"]
        assert isinstance(ids, torch.Tensor)
        assert isinstance(labels, torch.Tensor)
        if blank:
            inputs["labels"] = torch.full_like(labels, NO_LABEL)
            return MicroBatch(inputs, 0, 0, 0)
        real = sum(len(sample.input_ids) for row in samples for sample in row)
        return MicroBatch(inputs, ids.numel(), real, int((labels[:, 1:] != NO_LABEL).sum()))
