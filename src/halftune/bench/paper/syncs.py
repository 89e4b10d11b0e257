"""Operators that make the host wait for the GPU, and how they run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree

from halftune.bench.paper.costs import loops_over_groups
from halftune.bench.paper.values import Values

aten = torch.ops.aten
# Results whose shape or value the host needs to go on.
_COMPUTED = (
    aten.nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
)
_WAITING = (*_COMPUTED, aten._local_scalar_dense.default, aten.masked_select.default, aten.equal.default)
_NAMES: dict[Any, str] = {aten._local_scalar_dense.default: "item"}
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a fake tensor is on the GPU."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def reads_mask(func: Any, args: Any) -> bool:
    """Whether an index is a mask, whose true positions are counted on the host."""
    return func in _INDEXED and any(isinstance(one, torch.Tensor) and one.dtype is torch.bool for one in args[1])


def sync_of(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """What makes the host wait in a call, or empty."""
    if func is aten._to_copy.default:
        return _copy_waits(args[0], kwargs.get("device"), non_blocking=bool(kwargs.get("non_blocking")))
    if func is aten.copy_.default:
        non_blocking = bool(kwargs.get("non_blocking")) or args[2:3] == (True,)
        return _copy_waits(args[1], device_of(args[0]), non_blocking=non_blocking)
    if not any(on_gpu(arg) for arg in args if isinstance(arg, torch.Tensor)):
        return ""
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return ""
    if loops_over_groups(func._schema.name, args):
        return "sizes of groups"
    name = func._schema.name.removeprefix("aten::")
    if reads_mask(func, args):
        return f"{name} by a mask"
    return (_NAMES.get(func) or name) if func in _WAITING else ""


def _copy_waits(source: torch.Tensor, target: Any, *, non_blocking: bool) -> str:
    waits = target is not None and torch.device(target).type == "cpu" and on_gpu(source)
    return "copy to the host" if waits and not non_blocking else ""


def by_positions(func: Any, args: Any, values: Values) -> tuple[Any, Any]:
    """The same selection by the positions that its mask marks, whose number fake tensors need; others unchanged."""
    if not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(args)):
        return func, args
    if func is aten.masked_select.default:
        return aten.index.Tensor, (args[0], _positions([args[1].expand(args[0].shape)], values))
    return func, (args[0], _positions(args[1], values), *args[2:]) if reads_mask(func, args) else args


def answer(func: Any, kwargs: dict[str, Any], values: Values) -> Callable[..., Any] | None:
    """The implementation of an operator on fake tensors that need values or a driver; None for others."""
    if func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
        return lambda tensor, **options: _to_host(func, tensor, options, values)
    if func is aten._local_scalar_dense.default:
        return lambda tensor: _scalar(values, tensor)
    if func is aten.equal.default:
        return lambda *both: _equal(*map(values.or_ones, both))
    if func is aten.uniform_.default:  # torch takes it apart into an operator that asks the driver
        return lambda tensor, *_, **__: tensor
    if func in _COMPUTED:
        return lambda *args, **kwargs: _computed(func, args, kwargs, values)
    return None


def _to_host(func: Any, tensor: torch.Tensor, options: dict[str, Any], values: Values) -> torch.Tensor:
    """Integers are real on the CPU; floating tensors stay fake."""
    if (options.get("dtype") or tensor.dtype).is_floating_point:
        return func(tensor, **options)
    return values.compute(func, (tensor,), options)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    with unset_fake_temporarily():
        return torch.equal(a, b)


def _scalar(values: Values, tensor: torch.Tensor) -> Any:
    with unset_fake_temporarily():
        return values.or_ones(tensor).item()


def _computed(func: Any, args: Any, kwargs: dict[str, Any], values: Values) -> Any:
    results, device = values.compute(func, args, kwargs), device_of(args[0])

    def fake(real: torch.Tensor) -> torch.Tensor:
        return values.set(torch.empty(real.shape, dtype=real.dtype, device=device), real)

    return fake(results) if isinstance(results, torch.Tensor) else tuple(map(fake, results))


def _positions(indices: Any, values: Values) -> list[torch.Tensor | None]:
    """Indices with every mask replaced by the positions at which it is true."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype is torch.bool:
            places = _computed(aten.nonzero.default, (index,), {}, values)
            known = values.of(places)
            for axis in range(index.ndim):
                column = torch.empty(places.shape[:1], dtype=torch.int64, device=device_of(index))
                found.append(column if known is None else values.set(column, known[:, axis]))
        else:
            found.append(index)
    return found


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device that Python code sees."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
