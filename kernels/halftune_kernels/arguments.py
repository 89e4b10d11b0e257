"""Checks of operators' arguments, among them segment boundaries; errors name the argument and what was expected.

Also the context operators run in: autocast off, since it would round their sums to half, and the current GPU set to
that of the tensors, since Triton launches on the current one.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any, TypeVar

import torch

from halftune_kernels.constants import constant

_READ: dict[int, tuple[weakref.ref[torch.Tensor], int, tuple[int, ...]]] = {}


@dataclass(frozen=True)
class Segments:
    """Samples as consecutive runs of rows.

    Attributes:
        bounds: N + 1 non-decreasing row indices, from 0 to B*T. Empty segments are allowed.
    """

    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of segments N."""
        return len(self.bounds) - 1

    @property
    def rows(self) -> int:
        """Number of rows B*T."""
        return self.bounds[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each segment."""
        return tuple(end - start for start, end in pairwise(self.bounds))


def find_segments(
    operator: str,
    batch: int,
    length: int,
    cu_seqlens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> Segments:
    """Return the segments of a [batch, length] input.

    Args:
        operator: name for errors.
        batch: B.
        length: T.
        cu_seqlens: [N + 1] int32 or int64 boundaries of the samples in the one row of a packed batch (B = 1).
        seq_idx: [B, T] integers; a sample begins where the value changes. Only without ``cu_seqlens``.

    Raises:
        ArgumentError: wrong dtype or shape, both given, B > 1 with ``cu_seqlens``, or invalid boundaries.
    """
    for name, given in (("cu_seqlens", cu_seqlens), ("seq_idx", seq_idx)):
        if given is not None and not isinstance(given, torch.Tensor):
            raise ArgumentError(operator, name, came=f"a {type(given).__name__}", expected="a tensor of integers")
    if cu_seqlens is not None and seq_idx is not None:
        raise ArgumentError(operator, "seq_idx", came="given with cu_seqlens", expected="one of the two")
    if cu_seqlens is not None:
        return _of_one_row(operator, batch, length, cu_seqlens)
    if seq_idx is not None and (tuple(seq_idx.shape) != (batch, length) or seq_idx.dtype.is_floating_point):
        came = f"{seq_idx.dtype} of shape {list(seq_idx.shape)}"
        raise ArgumentError(operator, "seq_idx", came=came, expected=f"integers of shape [B, T] = [{batch}, {length}]")
    if not length:
        return Segments((0,) * (batch + 1))
    if seq_idx is not None:
        return Segments(_changes(seq_idx))
    return Segments(tuple(range(0, batch * length + 1, length)))


def _of_one_row(operator: str, batch: int, length: int, cu_seqlens: torch.Tensor) -> Segments:
    if batch != 1:
        raise ArgumentError(operator, "batch size", came=batch, expected="1 with cu_seqlens (one packed row)")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        came = f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        raise ArgumentError(operator, "cu_seqlens", came=came, expected="int32 or int64 of shape [N + 1], N >= 1")
    bounds = on_host(cu_seqlens)
    if bounds[0] != 0 or bounds[-1] != length:
        came = f"from {bounds[0]} to {bounds[-1]}"
        raise ArgumentError(operator, "cu_seqlens", came=came, expected=f"from 0 to T = {length}")
    fall = next((i for i, (start, end) in enumerate(pairwise(bounds)) if end < start), None)
    if fall is not None:
        came = f"falling at {fall + 1}: {bounds[fall]} then {bounds[fall + 1]}"
        raise ArgumentError(operator, "cu_seqlens", came=came, expected="never falling")
    return Segments(bounds)


def on_host(tensor: torch.Tensor) -> tuple[int, ...]:
    """The integers of a one-dimensional tensor; a model's layers wait for the device once, not each.

    Not at all where `remember` was told them.
    """
    return _known(tensor) or remember(tensor, tensor.tolist())


def remember(tensor: torch.Tensor, values: Iterable[int]) -> tuple[int, ...]:
    """Say what a tensor on a GPU holds, until it changes, and return it.

    Of the CPU nothing is kept, where nothing waits: numpy may write there, which no version counts. Nor of inference
    tensors, which count none.
    """
    values = tuple(values)
    if tensor.device.type != "cpu" and not tensor.is_inference():
        number = id(tensor)
        _READ[number] = (weakref.ref(tensor, lambda _: _READ.pop(number, None)), tensor._version, values)
    return values


def _known(tensor: torch.Tensor) -> tuple[int, ...]:
    reference, version, values = _READ.get(id(tensor), (lambda: None, 0, ()))
    return values if reference() is tensor and version == tensor._version else ()


def _changes(seq_idx: torch.Tensor) -> tuple[int, ...]:
    """Boundaries from ``seq_idx`` ``[B, T]``."""
    if known := _known(seq_idx):
        return known
    batch, length = seq_idx.shape
    new = torch.ones(batch, length, dtype=torch.bool, device=seq_idx.device)
    new[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return remember(seq_idx, (*new.flatten().nonzero().flatten().tolist(), batch * length))


@constant(32)
def chunk_table(segments: Segments, chunk: int, device: torch.device) -> torch.Tensor:
    """[NC, 4] int32 for kernels: segment, chunk within the segment, first row of the segment, rows of the segment."""
    table = [
        (n, place, segments.bounds[n], length)
        for n, length in enumerate(segments.lengths)
        for place in range(-(-length // chunk))
    ]
    return torch.tensor(table, dtype=torch.int32).reshape(-1, 4).to(device)


@constant(32)
def segment_table(segments: Segments, chunk: int, device: torch.device) -> torch.Tensor:
    """[N, 4] int32 for kernels: segment, its first chunk in `chunk_table`, first row, rows; longest segment first."""
    table, first = [], 0
    for n, length in enumerate(segments.lengths):
        table.append((n, first, segments.bounds[n], length))
        first += -(-length // chunk)
    return torch.tensor(sorted(table, key=lambda row: -row[3]), dtype=torch.int32).to(device)


F = TypeVar("F", bound=Callable[..., Any])


def without_autocast(function: F) -> F:
    """Wrap ``function`` to run without autocast and, on CUDA, with its first tensor's GPU as the current device."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        first = next(tensors, None)
        if first is None or first.device.type == "meta":
            return function(*args, **kwargs)
        with ExitStack() as inside:
            if first.device.type == "cuda":
                inside.enter_context(torch.cuda.device(first.device))
            if torch.is_autocast_enabled(first.device.type):
                inside.enter_context(torch.autocast(first.device.type, enabled=False))
            return function(*args, **kwargs)

    return called  # type: ignore[return-value]


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
