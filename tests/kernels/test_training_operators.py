"""Operators of training on a CPU against fp64: forward and every gradient, no worse than separate operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from halftune_kernels.ops import causal_segments, linear_cross_entropy, lora_linear, lora_mlp, rms_norm
from halftune_kernels.ops.causal_segments.reference import reference as causal_segments_reference
from halftune_kernels.ops.linear_cross_entropy.reference import reference as linear_cross_entropy_reference
from halftune_kernels.ops.lora_linear import AdaptedWeight, Packed, stacked
from halftune_kernels.ops.lora_linear.reference import reference as lora_linear_reference
from halftune_kernels.ops.lora_mlp import stacked as stacked_mlp
from halftune_kernels.ops.lora_mlp.reference import reference as lora_mlp_reference
from halftune_kernels.ops.rms_norm.reference import reference as rms_norm_reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
BOUND = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
DRAWS = 100  # of few bf16 rows: their roundings are hardly averaged, and one draw in forty of one row exceeds the bound
HIDDEN, INNER = 48, 80


def layer(outputs: int, inputs: int, *, bias: bool = False, rank: int | None = 8) -> AdaptedWeight:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64) * shape[-1] ** -0.5

    factors = (random(rank, inputs), random(outputs, rank)) if rank else (None, None)
    return AdaptedWeight(random(outputs, inputs), random(outputs) if bias else None, *factors, scale=1.7)


def cast(made: AdaptedWeight, dtype: torch.dtype) -> AdaptedWeight:
    given: Any = made[:4]
    tensors = [None if tensor is None else tensor.detach().to(dtype, copy=True) for tensor in given]
    return AdaptedWeight(*tensors, scale=made.scale)  # type: ignore[arg-type]


def results(
    run: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    layers: Sequence[AdaptedWeight],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Output and every gradient, for an incoming gradient that depends on nothing but the shape."""
    leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in inputs]
    made = [cast(one, dtype) for one in layers]
    factors = [factor.requires_grad_() for one in made for factor in (one.a, one.b) if factor is not None]
    out = run(*leaves, *made)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    out.backward(weight.to(out.dtype))
    gradients = [leaf.grad for leaf in (*leaves, *factors)]
    assert all(gradient is not None and gradient.dtype == dtype for gradient in gradients)
    return [out.detach(), *gradients]  # type: ignore[list-item]


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def check(ours: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], inputs, layers, dtype) -> None:
    """Right to the format's own rounding, and not worse than the separate operations in the same format."""
    found, separate = both_errors(ours, plain, inputs, layers, dtype)
    assert max(found) < BOUND[dtype], found
    if dtype == torch.bfloat16:
        # each of the few errors is a random number of its own; together they tell a rounding too many
        assert sum(found) <= 1.1 * sum(separate), (found, separate)


def both_errors(ours, plain, inputs, layers, dtype) -> tuple[list[float], list[float]]:
    """Errors of ours and of the separate operations, against fp64."""
    exact = results(plain, inputs, layers, torch.float64)
    return tuple(errors(results(run, inputs, layers, dtype), exact) for run in (ours, plain))  # type: ignore[return-value]


def check_few_rows(ours, plain, make: Callable[[], tuple[list[torch.Tensor], list[AdaptedWeight]]]) -> None:
    """As :func:`check` in bf16, of the means over many draws."""
    drawn = [both_errors(ours, plain, *make(), torch.bfloat16) for _ in range(DRAWS)]
    found, separate = (torch.tensor([pair[side] for pair in drawn]).mean(0) for side in (0, 1))
    assert found.max() < BOUND[torch.bfloat16], found
    assert found.sum() <= 1.1 * separate.sum(), (found, separate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 63, 2100])
def test_lora_linear(dtype: torch.dtype, rows: int) -> None:
    def make() -> tuple[list[torch.Tensor], list[AdaptedWeight]]:
        layers = [layer(HIDDEN, HIDDEN, bias=True), layer(16, HIDDEN), layer(24, HIDDEN, rank=None)]
        return [torch.randn(1, rows, HIDDEN, dtype=torch.float64)], layers

    def ours(x: torch.Tensor, *made: AdaptedWeight) -> torch.Tensor:
        return torch.cat(lora_linear.lora_linear(x, made), -1)

    def plain(x: torch.Tensor, *made: AdaptedWeight) -> torch.Tensor:
        return torch.cat([lora_linear_reference(x, one) for one in made], -1)

    if rows <= 63 and dtype == torch.bfloat16:
        check_few_rows(ours, plain, make)
    else:
        check(ours, plain, *make(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2100])
def test_lora_mlp(dtype: torch.dtype, rows: int) -> None:
    def make() -> tuple[list[torch.Tensor], list[AdaptedWeight]]:
        layers = [layer(INNER, HIDDEN), layer(INNER, HIDDEN, rank=None), layer(HIDDEN, INNER, bias=True)]
        return [torch.randn(rows, HIDDEN, dtype=torch.float64)], layers

    if rows <= 63 and dtype == torch.bfloat16:
        check_few_rows(lora_mlp.lora_mlp, lora_mlp_reference, make)
    else:
        check(lora_mlp.lora_mlp, lora_mlp_reference, *make(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lora_linear_stacked(dtype: torch.dtype) -> None:
    """What GPUs run, on a CPU: one product for all A, and a packed weight."""
    layers = [layer(HIDDEN, HIDDEN, bias=True), layer(16, HIDDEN, rank=3), layer(24, HIDDEN, rank=None)]

    def ours(x: torch.Tensor, *made: AdaptedWeight) -> torch.Tensor:
        dense = made[1].weight
        assert isinstance(dense, torch.Tensor)
        packed = made[1]._replace(weight=Packed(lambda: dense, (16, HIDDEN)))
        return torch.cat(stacked.lora_linear(x, [made[0], packed, made[2]]), -1)

    def plain(x: torch.Tensor, *made: AdaptedWeight) -> torch.Tensor:
        return torch.cat([lora_linear_reference(x, one) for one in made], -1)

    check(ours, plain, [torch.randn(900, HIDDEN, dtype=torch.float64)], layers, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "rank"), [("silu", 8), ("gelu_tanh", None)])
def test_lora_mlp_stacked(dtype: torch.dtype, activation: str, rank: int | None) -> None:
    layers = [layer(INNER, HIDDEN), layer(INNER, HIDDEN, rank=rank), layer(HIDDEN, INNER, bias=True)]
    inputs = [torch.randn(900, HIDDEN, dtype=torch.float64)]

    def ours(x: torch.Tensor, gate: AdaptedWeight, up: AdaptedWeight, down: AdaptedWeight) -> torch.Tensor:
        return stacked_mlp.lora_mlp(x, gate, up, down, activation)

    def plain(x: torch.Tensor, gate: AdaptedWeight, up: AdaptedWeight, down: AdaptedWeight) -> torch.Tensor:
        return lora_mlp_reference(x, gate, up, down, activation)

    check(ours, plain, inputs, layers, dtype)


def test_a_second_backward_pass_over_overwritten_products_is_refused() -> None:
    """And gives no wrong gradient."""
    layers: Any = [
        cast(one, torch.float32) for one in (layer(INNER, HIDDEN), layer(INNER, HIDDEN), layer(HIDDEN, INNER))
    ]
    gate, up, down = layers
    out = stacked_mlp.lora_mlp(torch.randn(9, HIDDEN, requires_grad=True), gate, up, down, "silu").sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        out.backward()


def test_lora_mlp_without_gradients_keeps_nothing_and_says_the_same() -> None:
    layers: Any = [
        cast(one, torch.float32) for one in (layer(INNER, HIDDEN), layer(INNER, HIDDEN), layer(HIDDEN, INNER))
    ]
    x = torch.randn(900, HIDDEN)
    with torch.no_grad():
        quiet = lora_mlp.lora_mlp(x, *layers)
    assert torch.equal(quiet, lora_mlp.lora_mlp(x.requires_grad_(), *layers))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, offset: float) -> None:
    x, weight = 3 * torch.randn(2, 500, 33, dtype=torch.float64), torch.randn(33, dtype=torch.float64)
    check(
        lambda x, w: rms_norm.rms_norm(x, w, 1e-6, offset=offset),
        lambda x, w: rms_norm_reference(x, w, 1e-6, offset),
        [x, weight],
        [],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (4, 4)])
def test_causal_segments(dtype: torch.dtype, heads: int, groups: int) -> None:
    lengths = (63, 1, 130, 64)
    inputs = [torch.randn(sum(lengths), count, 16, dtype=torch.float64).transpose(0, 1) for count in (heads, groups)]
    inputs.append(torch.randn(groups, sum(lengths), 16, dtype=torch.float64))
    check(
        lambda q, k, v: causal_segments.causal_segments(q, k, v, lengths, 0.3),
        lambda q, k, v: causal_segments_reference(q, k, v, lengths, 0.3),
        inputs,
        [],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("factor", "smoothing"), [(1.0, 0.0), (0.003, 0.0), (0.003, 0.3)])
def test_linear_cross_entropy(dtype: torch.dtype, factor: float, smoothing: float) -> None:
    targets = torch.randint(0, 101, (300,))
    targets[::7] = -100
    inputs = [torch.randn(300, 24, dtype=torch.float64), torch.randn(101, 24, dtype=torch.float64)]
    inputs.append(torch.randn(101, dtype=torch.float64))

    def ours(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"scale": factor, "label_smoothing": smoothing}
        found = linear_cross_entropy.linear_cross_entropy_sum(hidden, weight, targets, bias, **options)
        return factor * found.to(dtype)

    def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return factor * linear_cross_entropy_reference(hidden, weight, targets, bias, label_smoothing=smoothing)

    check(ours, plain, inputs, [], dtype)


def test_a_scale_that_was_not_told_is_right_too() -> None:
    hidden, weight = torch.randn(40, 24, requires_grad=True), torch.randn(101, 24)
    targets = torch.randint(0, 101, (40,))
    (3 * linear_cross_entropy.linear_cross_entropy_sum(hidden, weight, targets, scale=0.5)).backward()
    found, hidden.grad = hidden.grad, None
    (3 * linear_cross_entropy_reference(hidden, weight, targets)).backward()
    torch.testing.assert_close(found, hidden.grad)
