"""Kimi delta attention in Triton, run by the interpreter: outputs and every gradient against the fp64 recurrence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

import torch.nn.functional as F
from interpreter import interpreting
from operator_checks import CPU

from halftune_kernels.cases import Case, case, rounded
from halftune_kernels.ops.kda import kda
from halftune_kernels.selfcheck import BOUNDS, relative_error

DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _interpreted(poisoned: None) -> Iterator[None]:
    with interpreting():
        yield


def check(plain: Case, dtype: torch.dtype, backend: str = "triton") -> None:
    """Outputs and every gradient within the self-check's bounds."""
    made = rounded(plain, dtype)
    truth, found = made.call(torch.float64, CPU, "reference"), made.call(dtype, CPU, backend)
    assert found.keys() == truth.keys()
    errors = {name: relative_error(value, truth[name]) for name, value in found.items()}
    assert max(errors.values()) <= BOUNDS[dtype], errors


def grouped(size: int, width: int, bounds: tuple[int, ...], seed: int) -> Case:
    """Two value heads on one key head, values of another size than keys."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    length = bounds[-1]
    inputs = {
        "q": normal(1, length, 1, size),
        "k": normal(1, length, 1, size),
        "v": normal(1, length, 2, width),
        "g": -F.softplus(normal(1, length, 2, size)),
        "beta": torch.sigmoid(normal(1, length, 2)),
        "initial_state": normal(len(bounds) - 1, 2, size, width),
    }
    return dataclasses.replace(case("kda", size, bounds), inputs=inputs)


def one_head(plain: Case) -> Case:
    """The first head alone: the interpreter takes half the time."""
    inputs = {name: x[:, :1] if name == "initial_state" else x[:, :, :1] for name, x in plain.inputs.items()}
    return dataclasses.replace(plain, inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_segments(dtype: torch.dtype) -> None:
    check(grouped(16, 20, (0, 1, 1, 21), seed=1), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16])  # in fp32 and fp16: RWKV-7's, of the same parts
def test_several_chunks_and_channel_tiles(dtype: torch.dtype) -> None:
    check(one_head(case("kda", 40, (0, 64, 67), seed=2)), dtype)


@pytest.mark.parametrize("length", [20, pytest.param(66, marks=pytest.mark.slow)])
def test_decays_of_nothing_and_of_everything_side_by_side(length: int) -> None:
    """exp(20) between neighbours: a decay from a difference of sums would lose the digits of the slow ones."""
    plain = grouped(16, 16, (0, length), seed=3)
    kind = torch.randint(3, plain.inputs["g"].shape, generator=torch.Generator().manual_seed(3))
    g = torch.where(kind == 0, -20.0, torch.where(kind == 1, 0.0, plain.inputs["g"]))
    check(dataclasses.replace(plain, inputs=plain.inputs | {"g": g}), torch.float32)


@pytest.mark.parametrize("backend", ["triton", "cpu"])
@pytest.mark.parametrize("decay", [-20.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, -1000.0))])
def test_one_decay(decay: float, backend: str) -> None:
    """At -20, gradients of 1e-9 beside terms of 1 that have no part in them."""
    plain = one_head(case("kda", 16, (0, 18), seed=4))
    g = torch.full_like(plain.inputs["g"], decay)
    check(dataclasses.replace(plain, inputs=plain.inputs | {"g": g}), torch.float32, backend)


def test_without_extras() -> None:
    plain = one_head(case("kda", 12, (0, 17)))
    inputs = {name: x for name, x in plain.inputs.items() if name != "initial_state"}
    inputs["k"] = F.normalize(inputs["k"], dim=-1)
    check(dataclasses.replace(plain, inputs=inputs, options={}), torch.float32)


@pytest.mark.slow
def test_one_repeated_key() -> None:
    """Beta 1 and no decay: the inverse by a power series would lose every digit here."""
    plain = case("kda", 16, (0, 64))
    inputs = plain.inputs | {
        "k": plain.inputs["k"][:, :1].expand(-1, 64, -1, -1).contiguous(),
        "g": torch.full_like(plain.inputs["g"], -1e-6),
        "beta": torch.ones_like(plain.inputs["beta"]),
    }
    check(dataclasses.replace(plain, inputs=inputs), torch.float32)


def test_inference_keeps_nothing_and_answers_the_same() -> None:
    made = rounded(case("kda", 16, (0, 3, 9), seed=5), torch.float32)
    inputs = {name: x.float() for name, x in made.inputs.items()}
    with torch.no_grad():
        o, final = kda(**inputs, **made.options, backend="triton")
        truth, ends = kda(**inputs, **made.options, backend="reference")
    assert relative_error(o, truth) <= BOUNDS[torch.float32]
    assert final is not None
    assert ends is not None
    assert relative_error(final, ends) <= BOUNDS[torch.float32]
