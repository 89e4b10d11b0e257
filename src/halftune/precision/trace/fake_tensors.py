"""CPU tensors without data, so that a model of any size runs in seconds without memory for weights.

Floating tensors are fake; integers and booleans are real, and so is what is computed from them alone: token ids,
positions, grids and lengths have values, and model code may look at them.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils import _pytree as pytree

# Errors of fake tensors if model code reads a floating value.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)

# FakeTensorMode.__torch_dispatch__ logs a traceback of each TypeError and raises it all the same
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
_PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))
_EXPERTS = torch.ops.aten._grouped_mm.default
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class FakeTensors(FakeTensorMode):
    """A mode in which new floating tensors have dtype and shape but no data."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._replaced: list[Any] = []
        self._decomposed = 0  # operations that torch is taking apart right now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not set(types) <= {FakeTensor}:
            return NotImplemented  # a pair of float8 values and scales takes itself apart
        if _is_real(func, args, kwargs, new=not self._decomposed):
            return func(*args, **kwargs)
        if func in _PRODUCTS:
            # refuse matmuls of mixed dtypes, which fake tensors would accept
            formats = list(
                dict.fromkeys(str(arg.dtype).removeprefix("torch.") for arg in args if isinstance(arg, torch.Tensor))
            )
            if len(formats) > 1:
                raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {' != '.join(formats)}")
        if func in _INDEXED:
            args = (args[0], _as_numbers(args[1]), *args[2:])
        if func is torch.ops.aten.masked_select.default and not isinstance(args[1], FakeTensor):
            func, args = torch.ops.aten.index.Tensor, (args[0], _as_numbers([args[1].expand(args[0].shape)]))
        if func is _EXPERTS and args[0].dtype is not torch.bfloat16:
            # The kernels also support fp32 and fp16, torch's shape functions only bf16.
            halves = [operand.to(torch.bfloat16) for operand in args[:2]]
            out: Any = super().__torch_dispatch__(func, types, (*halves, *args[2:]), kwargs)
            return out.to(args[0].dtype)
        self._decomposed += 1  # an empty tensor that torch makes for a result has no values either
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._decomposed -= 1

    def __enter__(self) -> FakeTensors:
        self._replaced.append(nn.Module._apply)  # torch enters a mode again while it is entered
        nn.Module._apply = _converted
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        nn.Module._apply = self._replaced.pop()

    def strip(self, model: nn.Module) -> None:
        """Replace a model's floating parameters by tensors without data; small buffers keep theirs."""
        for module in model.modules():
            for name, parameter in module._parameters.items():
                real = parameter is not None and parameter.is_floating_point() and not isinstance(parameter, FakeTensor)
                if parameter is not None and real:
                    module._parameters[name] = nn.Parameter(
                        self.from_tensor(parameter.detach()), requires_grad=parameter.requires_grad
                    )


def _as_numbers(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Convert real masks in indices to positions: the length of a fake mask would be unknown."""
    known: list[torch.Tensor | None] = []
    for index in indices:
        mask = index is not None and index.dtype is torch.bool and not isinstance(index, FakeTensor)
        known += list(index.nonzero(as_tuple=True)) if index is not None and mask else [index]
    return known


def _converted(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """``Module._apply`` without swapping tensor objects, which fake tensors refuse.

    Parameters keep their identity, so that tied ones stay tied.
    """
    if recurse:
        for child in self.children():
            child._apply(fn)
    for parameter in self._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                parameter.data = fn(parameter)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _is_real(func: Any, args: Any, kwargs: Any, *, new: bool) -> bool:
    """Whether an operation has values.

    Args:
        func: the operation.
        args: its positional arguments.
        kwargs: its named arguments.
        new: whether a tensor that is made from no other has values.
    """
    if func is torch.ops.prim.device.default:  # half of all calls
        return False
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if tensors:
        return not any(isinstance(tensor, FakeTensor) for tensor in tensors)
    dtype = kwargs.get("dtype")
    if not new:
        return False
    if dtype is None:
        return func._schema.name == "aten::arange" and all(isinstance(arg, int) for arg in args)
    return not dtype.is_floating_point and not dtype.is_complex
