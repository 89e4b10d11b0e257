"""Interface of distribution strategies; the base class is the strategy of a single process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch
from accelerate import Accelerator
from torch import nn

from halftune.plan import Plan

if TYPE_CHECKING:
    from halftune.model.load.lazy_weights import LazyWeights


class Strategy:
    """One process with a whole model.

    Attributes:
        name: as in ``Plan.distribution``.
        sharded: whether a process holds a share of each weight only. Then every forward pass, and whatever looks at
            whole weights, needs all processes at the same time.
    """

    name: ClassVar[str] = "single"
    sharded: ClassVar[bool] = False

    def __init__(self, accelerator: Accelerator, plan: Plan) -> None:
        self.accelerator, self.plan = accelerator, plan

    def place(self, model: nn.Module, lazy: LazyWeights | None = None) -> None:
        """Puts a model that was built on the CPU where it is computed, if it may be there as a whole.

        Args:
            model: with its adapter.
            lazy: where its weights are, if they have not been read: for strategies that are ``sharded``.
        """
        model.to(self.accelerator.device)

    def wrap(self, model: nn.Module, lazy: LazyWeights | None = None) -> nn.Module:
        """What forward passes are made with; the optimizer is made after this, from ``model``'s own parameters.

        Raises:
            PlanError: the strategy that came up is not the planned one.
        """
        return model

    @contextmanager
    def accumulating(self, wrapped: nn.Module, *, last: bool) -> Iterator[None]:
        """Around forward and backward pass of a micro-batch; gradients are complete after the ``last`` of a step."""
        yield

    def gradient_norm(
        self, parameters: Sequence[nn.Parameter], limit: float, factor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The norm of all gradients together, over whatever is shared: a scalar on their device.

        Args:
            parameters: their gradients are clipped to ``limit`` where that is not 0.
            limit: largest norm.
            factor: a scalar on the device that the gradients are multiplied with first.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = self.total_norm(gradients)
        if factor is None:
            if limit > 0:
                nn.utils.clip_grads_with_norm_(parameters, limit, norm)
            return norm
        norm = norm.to(factor) * factor
        if limit > 0:
            factor = factor * (limit / (norm + 1e-6)).clamp(max=1.0)
        # once through the gradients, as clipping alone would
        torch._foreach_mul_(gradients, factor.float())  # pyright: ignore[reportPrivateImportUsage]
        return norm

    def total_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of gradients, over whatever is shared: a scalar on their device."""
        return nn.utils.get_total_norm(gradients)

    def after_evaluation(self, wrapped: nn.Module) -> None:
        """Called after forward passes without a backward pass."""

    @contextmanager
    def generating(self, model: nn.Module) -> Iterator[None]:
        """Around many forward passes without a backward pass, one for each token; all processes enter together."""
        yield

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the unsharded tensor on its device. A collective: all processes call it in the same order."""
        return tensor

    def result(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Iterate over ``(name, unsharded CPU tensor)`` of the final result; None if the model holds whole weights.

        A collective: all processes iterate to the end.
        """
        return None
