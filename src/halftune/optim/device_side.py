"""What an optimizer decides on its device: to leave an update out without anyone waiting for the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer


def can_skip(optimizer: Optimizer) -> bool:
    """Whether :func:`skipping` works: torch's fused optimizers look at ``found_inf`` themselves."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@contextmanager
def skipping(optimizer: Any, broken: torch.Tensor) -> Iterator[None]:
    """Inside, a step of a fused optimizer changes neither weights nor state where ``broken`` is true.

    Args:
        optimizer: one that :func:`can_skip` is true of.
        broken: a bool scalar on the device.
    """
    optimizer.grad_scale, optimizer.found_inf = None, broken.float()
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def loss_scaling(scaler: Any, optimizer: Optimizer, like: torch.Tensor) -> list[torch.Tensor]:
    """What :func:`scale_after` is computed from, each ``[1]`` with the dtype and device of ``like``.

    Call it after ``unscale_``. Empty without a scaler.
    """
    if not scaler.is_enabled():
        return []
    overflows = torch.stack([one.to(like) for one in scaler._found_inf_per_device(optimizer).values()]).sum()
    return [one.to(like).reshape(1) for one in (scaler._scale, scaler._growth_tracker, overflows)]


def scale_after(scaler: Any, scale: float, tracker: float, overflows: float) -> tuple[bool, float]:
    """Whether the optimizer will update the weights, and the loss scale then.

    Args:
        scaler: torch's ``GradScaler``, before its ``step`` and ``update``.
        scale: the loss scale.
        tracker: updates in a row without an overflow.
        overflows: 0 where no gradient has overflowed.
    """
    if overflows:
        return False, scale * scaler.get_backoff_factor()
    grown = scale * scaler.get_growth_factor()
    return True, grown if tracker + 1 == scaler.get_growth_interval() else scale
