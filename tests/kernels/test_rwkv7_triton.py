"""RWKV-7 in Triton, run by the interpreter: outputs and every gradient against the fp64 recurrence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from interpreter import interpreting
from operator_checks import CPU

from halftune_kernels.cases import Case, case, rounded
from halftune_kernels.ops.rwkv7 import rwkv7
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


def one_head(plain: Case) -> Case:
    """The first head alone: the interpreter takes half the time."""
    inputs = {name: x[:, :1] if name == "initial_state" else x[:, :, :1] for name, x in plain.inputs.items()}
    return dataclasses.replace(plain, inputs=inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_segments(dtype: torch.dtype) -> None:
    check(one_head(case("rwkv7", 16, (0, 1, 1, 20), seed=1)), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # in bf16: KDA's, of the same parts
def test_several_chunks_and_channel_tiles(dtype: torch.dtype) -> None:
    check(one_head(case("rwkv7", 40, (0, 64, 67), seed=2)), dtype)


@pytest.mark.parametrize("length", [20, pytest.param(66, marks=pytest.mark.slow)])
def test_decays_of_nothing_and_of_everything_side_by_side(length: int) -> None:
    """exp(20) between neighbours: a decay from a difference of sums would lose the digits of the slow ones."""
    plain = one_head(case("rwkv7", 16, (0, length), seed=3))
    kind = torch.randint(3, plain.inputs["w"].shape, generator=torch.Generator().manual_seed(3))
    w = torch.where(kind == 0, -20.0, torch.where(kind == 1, 0.0, plain.inputs["w"]))
    check(dataclasses.replace(plain, inputs=plain.inputs | {"w": w}), torch.float32)


@pytest.mark.parametrize("backend", ["triton", "cpu"])
@pytest.mark.parametrize("decay", [-20.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_one_decay(decay: float, backend: str) -> None:
    """At -20, gradients of 1e-9 beside terms of 1 that have no part in them."""
    plain = one_head(case("rwkv7", 16, (0, 18), seed=4))
    w = torch.full_like(plain.inputs["w"], decay)
    check(dataclasses.replace(plain, inputs=plain.inputs | {"w": w}), torch.float32, backend)


def test_without_extras_and_values_of_another_size() -> None:
    plain = one_head(case("rwkv7", 12, (0, 17)))
    inputs = {name: x for name, x in plain.inputs.items() if name != "initial_state"}
    inputs["v"] = torch.cat((inputs["v"], inputs["v"].flip(1)), -1)
    check(dataclasses.replace(plain, inputs=inputs, options={"scale": 0.3}), torch.float32)


def test_inference_keeps_nothing_and_answers_the_same() -> None:
    made = rounded(case("rwkv7", 16, (0, 3, 9), seed=5), torch.float32)
    inputs = {name: x.float() for name, x in made.inputs.items()}
    with torch.no_grad():
        o, final = rwkv7(**inputs, **made.options, backend="triton")
        truth, ends = rwkv7(**inputs, **made.options, backend="reference")
    assert relative_error(o, truth) <= BOUNDS[torch.float32]
    assert final is not None
    assert ends is not None
    assert relative_error(final, ends) <= BOUNDS[torch.float32]
