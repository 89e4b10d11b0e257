"""Distributed data parallelism: a whole model on each device, gradients averaged while they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halftune.core.errors import PlanError
from halftune.model.load.lazy_weights import LazyWeights
from halftune.plan import Plan
from halftune.train.parallel.barrier import barrier
from halftune.train.parallel.strategy import Strategy


class Ddp(Strategy):
    """torch's DDP through accelerate.

    Gradients live in the buckets that are summed, so that they take no memory twice. Buffers (rotary tables) are the
    same everywhere and nobody changes them; torch's default would send rank 0's in every forward pass.
    """

    name: ClassVar[str] = "ddp"

    def __init__(self, accelerator: Accelerator, plan: Plan) -> None:
        super().__init__(accelerator, plan)
        accelerator.ddp_handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)  # type: ignore[assignment]

    def wrap(self, model: nn.Module, lazy: LazyWeights | None = None) -> nn.Module:
        """See :class:`Strategy`."""
        barrier(self.accelerator.num_processes)  # one may have read its weights from a slower disk
        wrapped: nn.Module = self.accelerator.prepare_model(model)
        if not isinstance(wrapped, DistributedDataParallel):
            raise PlanError(
                f"expected DistributedDataParallel, got {type(wrapped).__name__}: gradients would not be averaged",
                remedy="start it with `halftune train` or torchrun",
                code="launch.process_count_differs",
            )
        wrapped.broadcast_buffers = False  # said as an option, torch warns of its new name, which accelerate knows not
        return wrapped

    @contextmanager
    def accumulating(self, wrapped: nn.Module, *, last: bool) -> Iterator[None]:
        """See :class:`Strategy`."""
        if last:
            yield
            return
        with self.accelerator.no_sync(wrapped):
            yield
