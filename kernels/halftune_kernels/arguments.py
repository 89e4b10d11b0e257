"""Checks of operators' arguments; errors name the argument, its value and what was expected."""

from __future__ import annotations

import math
from numbers import Real

import torch


class ArgumentError(ValueError):
    """An operator was called with an invalid argument.

    Args:
        operator: name of the operator.
        argument: name of the argument.
        came: the value passed.
        expected: the accepted values.
    """

    def __init__(self, operator: str, argument: str, *, came: object, expected: str) -> None:
        self.operator, self.argument, self.came, self.expected = operator, argument, came, expected
        super().__init__(f"{operator}: {argument} is {came}, expected {expected}")


class Shapes:
    """Binds dimension names to sizes over several tensors.

    >>> import torch
    >>> shapes = Shapes("demo")
    >>> shapes.check("q", torch.zeros(2, 3), "B T")
    >>> shapes["T"]
    3
    """

    def __init__(self, operator: str, **sizes: int) -> None:
        self.operator, self._sizes = operator, dict(sizes)

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def check(self, argument: str, tensor: torch.Tensor | None, names: str, *, optional: bool = False) -> None:
        """Raise `ArgumentError` unless ``tensor`` has the named dimensions in order, or is None and ``optional``."""
        if tensor is None and optional:
            return
        expected = names.split()
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                self.operator, argument, came=_kind(tensor), expected=f"a tensor of shape [{', '.join(expected)}]"
            )
        fits = tensor.dim() == len(expected) and all(
            self._sizes.setdefault(name, size) == size for name, size in zip(expected, tensor.shape, strict=True)
        )
        if not fits:
            known = ", ".join(f"{name}={self._sizes[name]}" for name in expected if name in self._sizes)
            raise ArgumentError(
                self.operator,
                argument,
                came=f"of shape {list(tensor.shape)}",
                expected=f"[{', '.join(expected)}]" + (f" with {known}" if known else ""),
            )


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def check_floating(operator: str, **tensors: torch.Tensor | None) -> None:
    """Raise `ArgumentError` for arguments other than None and dense floating-point tensors of 16 bits or more."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(operator, name, came=_kind(tensor), expected="a tensor")
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ArgumentError(operator, name, came=tensor.dtype, expected="a floating-point dtype of 16 bits or more")
        if tensor.layout != torch.strided:
            raise ArgumentError(operator, name, came=tensor.layout, expected="a dense tensor")


def check_same_dtype(operator: str, **tensors: torch.Tensor) -> torch.dtype:
    """Return the common floating dtype of all tensors, else raise `ArgumentError`."""
    first, dtype = next((name, tensor.dtype) for name, tensor in tensors.items())
    check_floating(operator, **{first: tensors[first]})
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise ArgumentError(operator, name, came=tensor.dtype, expected=f"{dtype}, as {first}")
    check_floating(operator, **tensors)
    return dtype


def check_same_device(operator: str, **tensors: torch.Tensor | None) -> torch.device:
    """Return the common device of all tensors, else raise `ArgumentError`."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(operator, name, came=_kind(tensor), expected="a tensor")
    first, device = next((name, tensor.device) for name, tensor in given.items())
    for name, tensor in given.items():
        if tensor.device != device:
            raise ArgumentError(operator, name, came=f"on {tensor.device}", expected=f"{device}, as {first}")
    return device


def check_state(operator: str, state: torch.Tensor) -> None:
    """Raise `ArgumentError` unless ``state``, which is updated in place, is fp32 or fp64."""
    if state.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(operator, "state", came=state.dtype, expected="float32 (half precision would lose updates)")
    check_floating(operator, state=state)


def check_number(operator: str, argument: str, value: object, *, expected: str, least: float = -math.inf) -> float:
    """Return ``value`` as a float; raise `ArgumentError` unless it is a finite number ≥ ``least``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < least:
        raise ArgumentError(operator, argument, came=repr(value), expected=expected)
    return float(value)


def check_scale(operator: str, scale: object, *, keys: int | None = None) -> float:
    """Return ``scale``, by default ``keys ** -0.5``; raise `ArgumentError` for 0, which has no gradient, and others."""
    if scale is None and keys is not None:
        return keys**-0.5
    expected = "a finite number other than 0"
    if not (number := check_number(operator, "scale", scale, expected=expected)):
        raise ArgumentError(operator, "scale", came=scale, expected=expected)
    return number


def check_heads(operator: str, argument: str, heads: int, *, of: str, groups: int) -> None:
    """Raise `ArgumentError` unless ``heads`` is a multiple of ``groups``, the heads of argument ``of``."""
    if groups < 1 or heads % groups:
        raise ArgumentError(operator, argument, came=f"of {heads} heads", expected=f"a multiple of {of}'s {groups}")


def check_choice(operator: str, argument: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `ArgumentError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ArgumentError(operator, argument, came=repr(value), expected="one of " + ", ".join(map(repr, choices)))
