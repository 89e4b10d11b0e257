"""The micro-batches of a step on paper: two are run, and each that follows launches what the second did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map

from halftune.bench.paper.recorder import Launch, Recorder, Sync
from halftune.methods import Loss
from halftune.train.state import TrainState

RUN = 2  # the first makes gradients, others add to them


@dataclass(frozen=True)
class _Recorded:
    """What a micro-batch launches, and its most bytes over those before; the step's launches and calls before it."""

    launches: list[Launch]
    syncs: list[Sync]
    calls: int
    bytes: int
    launches_before: int
    calls_before: int


class MicroBatches:
    """The micro-batches of one step; of a step that is not recorded, the first alone is run."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self._number = recorder, 0

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Around a micro-batch; gives whether it must be run. What others do is not recorded."""
        recorder, bytes_before, peak = self.recorder, self.recorder.bytes, self.recorder.peak
        self._number += 1
        if self._number > (RUN if recorder.on else 1):
            with patch.object(recorder, "on", False):
                yield False
            if recorder.on:
                self._repeat(bytes_before)
            return
        first, waits, before = len(recorder.launches), len(recorder.syncs), recorder.calls
        recorder.peak = bytes_before
        yield True
        made, rise = recorder.launches[first:], recorder.peak - bytes_before
        self._last = _Recorded(made, recorder.syncs[waits:], recorder.calls, rise, first, before)
        recorder.peak = max(peak, recorder.peak)

    def _repeat(self, bytes_before: int) -> None:
        recorder, last = self.recorder, self._last
        later = len(recorder.launches) - last.launches_before
        head, *rest = last.launches
        recorder.launches += [replace(head, calls=head.calls - last.calls_before + recorder.calls), *rest]
        for sync in last.syncs:
            until = sync.until + later if sync.until >= last.launches_before else sync.until  # of an earlier step
            recorder.syncs.append(replace(sync, after=sync.after + later, until=until))
        recorder.calls, recorder.peak = last.calls, max(recorder.peak, bytes_before + last.bytes)


@contextmanager
def repeated_micro_batches(run: TrainState, recorder: Recorder) -> Iterator[None]:
    """Inside, for one step of ``train.loop.step``, micro-batches are those of ``MicroBatches``."""
    micro_batches, method, runs, losses = MicroBatches(recorder), run.method.loss, [True], list[Loss]()

    @contextmanager
    def accumulating(*_: Any, **__: Any) -> Iterator[None]:
        with micro_batches.one() as runs[0]:
            yield

    def loss(*asked: Any) -> Loss:
        if runs[0]:
            losses[:] = [method(*asked)]
        return losses[0] if runs[0] else _like(losses[0])

    with patch.object(run.strategy, "accumulating", accumulating), patch.object(run.method, "loss", loss):
        yield


def _like(loss: Loss) -> Loss:
    """A loss with the same sizes that depends on nothing."""
    metrics, columns = tree_map(torch.empty_like, (loss.metrics, loss.columns))
    total = torch.empty_like(loss.total).requires_grad_()
    total.register_post_accumulate_grad_hook(_drop_gradient)
    return Loss(total, metrics, columns)


def _drop_gradient(total: torch.Tensor) -> None:
    total.grad = None
