"""Every operator on a real GPU: outputs and gradients against the fp64 references, in every dtype and head size."""

from __future__ import annotations

import pytest
import torch

from halftune_kernels import selfcheck
from halftune_kernels.cases import case, rounded
from halftune_kernels.dispatch import OPERATORS, choose, has_triton
from halftune_kernels.selfcheck import BOUNDS, bound, relative_error

pytestmark = pytest.mark.gpu
WITH_KERNELS = [operator for operator in OPERATORS if has_triton(operator)]
ROWS = [(0, 1), (0, 2), (0, 63), (0, 64), (0, 65), (0, 100), (0, 1, 2, 66, 66, 130, 500), (0, 2000)]


@pytest.mark.parametrize("operator", WITH_KERNELS)
def test_selfcheck(operator: str) -> None:
    verdict = selfcheck.check(operator, torch.device("cuda"), "triton")
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("size", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("operator", WITH_KERNELS)
def test_every_size(operator: str, size: int, dtype: torch.dtype) -> None:
    _check(operator, size, (0, 1, 65, 65, 200), dtype)


@pytest.mark.parametrize("bounds", ROWS)
@pytest.mark.parametrize("operator", WITH_KERNELS)
def test_every_length(operator: str, bounds: tuple[int, ...]) -> None:
    _check(operator, 64, bounds, torch.bfloat16)


@pytest.mark.parametrize("operator", ["ssd", "gated_delta_rule"])
def test_torch_on_the_gpu(operator: str) -> None:
    verdict = selfcheck.check(operator, torch.device("cuda"), "torch", (64,))
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize("operator", WITH_KERNELS)
def test_a_choice_is_made_and_runs(operator: str) -> None:
    device = torch.device("cuda")
    backend = choose(operator, device, torch.float16)
    assert backend.name in ("triton", "torch"), backend
    if backend.name == "triton":
        assert case(operator, 64, (0, 80)).call(torch.float16, device, backend.name)


def _check(operator: str, size: int, bounds: tuple[int, ...], dtype: torch.dtype) -> None:
    made = rounded(case(operator, size, bounds, seed=size), dtype)
    truth = made.call(torch.float64, torch.device("cpu"), "reference")
    found = made.call(dtype, torch.device("cuda"), "triton")
    errors = {name: relative_error(value, truth[name]) / bound(name, dtype) for name, value in found.items()}
    assert max(errors.values()) <= 1, errors
