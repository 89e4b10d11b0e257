"""What every operator's tests share: poisoned buffers, and outputs and gradients against fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from halftune_kernels.cases import Case, rounded
from halftune_kernels.selfcheck import relative_error

CPU = torch.device("cpu")
BOUNDS = [(0, 1), (0, 2), (0, 63), (0, 64), (0, 65), (0, 100), (0, 1, 2, 66, 66, 130, 257), (0, 0, 64, 128)]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills every uninitialised tensor with NaN: what an operator leaves unwritten shows."""
    poison_empty(monkeypatch)


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `poisoned`, as long as ``monkeypatch`` lasts."""
    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"),
    ):  # fmt: skip
        original = getattr(owner, name)

        def poison(*args: Any, original: Callable[..., torch.Tensor] = original, **kwargs: Any) -> torch.Tensor:
            made = original(*args, **kwargs)
            return made.fill_(float("nan")) if made.dtype.is_floating_point else made

        monkeypatch.setattr(owner, name, poison)


def assert_matches(case: Case, backend: str, dtype: torch.dtype) -> None:
    """Outputs and every gradient of ``backend`` in ``dtype`` against the fp64 reference on the same inputs.

    fp64 and fp32 have fixed bounds. In half, twice the error of rounding the truth once: stricter than twice the error
    of a chunked reference that computes in half.
    """
    case = dataclasses.replace(rounded(case, dtype), scalar_decay="")  # exp(g) may be 0 here
    truth = case.call(torch.float64, CPU, "reference")
    found = case.call(dtype, CPU, backend)
    assert found.keys() == truth.keys()
    for name, value in found.items():
        bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype)
        if bound is None:
            bound = max(2 * relative_error(truth[name].to(dtype), truth[name]), 1e-5)
        error = relative_error(value, truth[name])
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


def assert_packed_as_alone(case: Case, time_axes: dict[str, int], backend: str) -> None:
    """A sample in a packed row gives what it gives alone, forward and backward, whatever its neighbours hold.

    Args:
        case: a case with ``cu_seqlens`` among its options.
        time_axes: axis along which an input runs over tokens, or -1 where its first axis runs over segments.
        backend: implementation.
    """
    bounds = case.options["cu_seqlens"].tolist()
    packed = case.call(torch.float32, CPU, backend)
    for n, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        inputs = dict(case.inputs)
        for name, axis in time_axes.items():
            whole = inputs[name]
            if axis == -1:
                inputs[name] = torch.full_like(whole, float("nan"))
                inputs[name][n] = whole[n]
            else:
                inputs[name] = torch.full_like(whole, float("nan"))
                piece = [slice(None)] * whole.dim()
                piece[axis] = slice(start, end)
                inputs[name][tuple(piece)] = whole[tuple(piece)]
        others = dataclasses.replace(case, inputs=inputs).call(torch.float32, CPU, backend)
        for name, axis in (*time_axes.items(), ("output 0", case_output_axis(case))):
            key = name if name.startswith("output") else f"d {name}"
            both = [x[n] if axis == -1 else x.narrow(axis, start, end - start) for x in (packed[key], others[key])]
            assert torch.equal(*both), f"{key} of segment {n} depends on its neighbours"


def case_output_axis(case: Case) -> int:
    """Axis of the output that runs over tokens."""
    return 2 if case.operator == "causal_conv1d" else 1
