"""The short convolution against its written-out sum."""

from __future__ import annotations

import pytest
import torch
from operator_checks import BOUNDS, assert_matches, assert_packed_as_alone

from halftune_kernels.arguments import ArgumentError, Segments
from halftune_kernels.cases import case
from halftune_kernels.ops.causal_conv1d import Convolution, causal_conv1d_fn, causal_conv1d_update, reference
from halftune_kernels.selfcheck import relative_error


@pytest.mark.parametrize("silu", [False, True])
def test_reference_gradients(silu: bool) -> None:
    torch.manual_seed(0)
    shapes = [(1, 6, 2), (2, 3), (2,), (3, 2, 2)]
    given = tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    segments = Segments((0, 1, 1, 6))
    assert torch.autograd.gradcheck(
        lambda x, weight, bias, state: reference.causal_conv1d(Convolution(x, weight, bias, silu, state, segments)),
        given,
    )


@pytest.mark.parametrize("bounds", BOUNDS)
def test_cpu_is_the_sum(bounds: tuple[int, ...], poisoned: None) -> None:
    assert_matches(case("causal_conv1d", 24, bounds, seed=bounds[-1]), "cpu", torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cpu_in_each_dtype(dtype: torch.dtype, poisoned: None) -> None:
    assert_matches(case("causal_conv1d", 100, (0, 1, 65, 300)), "cpu", dtype)


def test_blocks_of_rows_join(poisoned: None) -> None:
    assert_matches(case("causal_conv1d", 9000, (0, 2, 30)), "cpu", torch.float64)


def test_neighbours_in_a_packed_row_do_not_matter() -> None:
    axes = {"x": 2, "initial_states": -1}
    assert_packed_as_alone(case("causal_conv1d", 16, (0, 1, 3, 3, 50)), axes, "cpu")


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_final_states_continue_the_row(width: int) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(2, 5, 20), torch.randn(5, width)
    whole = causal_conv1d_fn(x, weight, activation="silu")
    first, state = causal_conv1d_fn(x[..., :9], weight, activation="silu", return_final_states=True)
    rest = causal_conv1d_fn(x[..., 9:], weight, activation="silu", initial_states=state)
    assert relative_error(torch.cat([first, rest], -1), whole) < 1e-6


def test_updates_continue_the_row() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 12), torch.randn(5, 4), torch.randn(5)
    whole = causal_conv1d_fn(x, weight, bias, activation="silu")
    state = torch.zeros(2, 5, 4)  # transformers keeps W columns, one more than needed
    for t in range(10):
        y = causal_conv1d_update(x[..., t], state, weight, bias, "silu")
        assert relative_error(y, whole[..., t]) < 1e-5
    assert relative_error(causal_conv1d_update(x[..., 10:], state, weight, bias, "silu"), whole[..., 10:]) < 1e-5
    assert torch.equal(state, x[..., -4:])


def test_fn_and_update_are_those_of_transformers() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 12), torch.randn(5, 4), torch.randn(5)
    expected = theirs.causal_conv1d_fn.__wrapped__(x, weight, bias, activation="silu")
    assert relative_error(causal_conv1d_fn(x, weight, bias, activation="silu"), expected) < 1e-6
    states = [torch.randn(2, 5, 4)] * 2
    states = [state.clone() for state in states]
    one = theirs.causal_conv1d_update.__wrapped__(x[..., :1], states[0], weight, bias, "silu")
    assert relative_error(causal_conv1d_update(x[..., :1], states[1], weight, bias, "silu"), one) < 1e-6
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4, 4)}, "weight is of shape [4, 4], expected [D, W] with D=5"),
        ({"activation": "gelu"}, "activation is 'gelu', expected one of None, 'silu', 'swish'"),
        ({"initial_states": torch.zeros(1, 5, 4)}, "initial_states is of 4 columns, expected W - 1 = 3"),
        ({"x": torch.zeros(1, 5, 6, dtype=torch.int32)}, "x is torch.int32, expected a floating-point dtype"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "cu_seqlens is from 0 to 7, expected from 0 to T = 6"),
    ],
)
def test_complaints_name_the_argument(change: dict[str, object], message: str) -> None:
    arguments = {"x": torch.zeros(1, 5, 6), "weight": torch.zeros(5, 4)} | change
    with pytest.raises(ArgumentError) as caught:
        causal_conv1d_fn(**arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)
