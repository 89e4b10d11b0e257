"""Gated delta rule, Kimi delta attention and RWKV-7 against their token recurrences: outputs and every gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operator_checks import BOUNDS, assert_matches, assert_packed_as_alone

from halftune_kernels.arguments import ArgumentError
from halftune_kernels.cases import Case, case
from halftune_kernels.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from halftune_kernels.ops.kda import kda, kda_step
from halftune_kernels.ops.rwkv7 import rwkv7, rwkv7_step
from halftune_kernels.scan.triangular import unit_lower_inverse
from halftune_kernels.selfcheck import relative_error

OPERATORS = ("gated_delta_rule", "kda", "rwkv7")
DECAY = {"gated_delta_rule": "g", "kda": "g", "rwkv7": "w"}


def changed(plain: Case, **inputs: torch.Tensor) -> Case:
    return dataclasses.replace(plain, inputs=plain.inputs | inputs)


@pytest.mark.parametrize("operator", OPERATORS)
def test_reference_gradients(operator: str) -> None:
    small = case(operator, 3, (0, 1, 1, 5))
    module = __import__(f"halftune_kernels.ops.{operator}", fromlist=[operator])
    function = getattr(module, operator)
    names, values = list(small.inputs), [x.detach().requires_grad_() for x in small.inputs.values()]
    assert torch.autograd.gradcheck(
        lambda *given: function(**dict(zip(names, given, strict=True)), **small.options, backend="reference"),
        values,
        fast_mode=True,
    )


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_cpu_is_the_recurrence(operator: str, bounds: tuple[int, ...], poisoned: None) -> None:
    assert_matches(case(operator, 16, bounds, seed=bounds[-1]), "cpu", torch.float64)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 96])
def test_cpu_in_each_dtype(operator: str, dtype: torch.dtype, size: int, poisoned: None) -> None:
    assert_matches(case(operator, size, (0, 1, 65, 100), seed=size), "cpu", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 128, 256])
def test_cpu_in_other_sizes(operator: str, dtype: torch.dtype, size: int) -> None:
    assert_matches(case(operator, size, (0, 63, 64, 64, 129), seed=size), "cpu", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_cpu_over_long_rows(operator: str) -> None:
    assert_matches(case(operator, 64, (0, 3, 800), seed=800), "cpu", torch.float32)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("without", ["state", "final", "both"])
def test_without_a_state(operator: str, without: str, poisoned: None) -> None:
    """The paths that skip what nobody reads: no entering state, no final one."""
    plain = case(operator, 16, (0, 5, 70, 70, 200), seed=5)
    inputs = {name: x for name, x in plain.inputs.items() if without == "final" or name != "initial_state"}
    options = plain.options | {"output_final_state": without == "state"}
    assert_matches(dataclasses.replace(plain, inputs=inputs, options=options), "cpu", torch.float32)


@pytest.mark.parametrize("operator", OPERATORS)
def test_neighbours_in_a_packed_row_do_not_matter(operator: str) -> None:
    plain = case(operator, 16, (0, 1, 64, 64, 150))
    axes = {name: -1 if name == "initial_state" else 1 for name in plain.inputs}
    assert_packed_as_alone(plain, axes, "cpu")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("decay", [0.0, -1e-4, -5.0, -30.0, -1000.0])
def test_extreme_decays(operator: str, decay: float) -> None:
    plain = case(operator, 16, (0, 130), seed=3)
    name = DECAY[operator]
    if decay == 0.0 and operator == "rwkv7":
        plain = changed(plain, b=plain.inputs["b"] * 0.5)
    assert_matches(changed(plain, **{name: torch.full_like(plain.inputs[name], decay)}), "cpu", torch.float32)


@pytest.mark.parametrize("operator", OPERATORS)
def test_slow_decays_between_fast_ones_keep_their_digits(operator: str) -> None:
    plain = case(operator, 16, (0, 130), seed=4)
    name = DECAY[operator]
    fast = torch.rand(plain.inputs[name].shape, dtype=torch.float64) < 0.3
    mixed = torch.where(fast, -200.0, -1e-3 * torch.rand(fast.shape, dtype=torch.float64))
    assert_matches(changed(plain, **{name: mixed}), "cpu", torch.float32)


@pytest.mark.parametrize("operator", ["gated_delta_rule", "kda"])
@pytest.mark.parametrize("beta", [0.999, 1.0])
def test_repeated_keys(operator: str, beta: float) -> None:
    """All keys the same: powers of the triangle would grow to 1e17, forward substitution stays exact."""
    plain = case(operator, 16, (0, 130), seed=6)
    k, gate = plain.inputs["k"], plain.inputs["g"]
    inputs = {"k": k[:, :1].expand_as(k).clone(), "beta": torch.full_like(plain.inputs["beta"], beta)}
    assert_matches(changed(plain, **inputs, g=gate * 1e-3), "cpu", torch.float32)


def test_inverse_of_a_triangle_of_ones() -> None:
    ones = torch.ones(1, 100, 100).tril(-1)
    expected = torch.eye(100) - torch.diag(torch.ones(99), -1)
    assert torch.equal(unit_lower_inverse(ones)[0], expected)


@pytest.mark.parametrize("function", [gated_delta_rule, kda])
def test_grouped_heads_are_repeated_ones(function: Any) -> None:
    torch.manual_seed(1)
    q, k, v, beta = torch.randn(2, 70, 2, 8), torch.randn(2, 70, 2, 8), torch.randn(2, 70, 6, 4), torch.rand(2, 70, 6)
    g = -torch.rand(2, 70, 6, 8) if function is kda else -torch.rand(2, 70, 6)
    grouped, _ = function(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    apart, _ = function(q.repeat_interleave(3, 2), k.repeat_interleave(3, 2), v, g, beta, use_qk_l2norm_in_kernel=True)
    assert relative_error(grouped, apart) < 1e-6


@pytest.mark.parametrize("function", [gated_delta_rule, kda])
def test_kimi_with_one_decay_for_all_channels_is_the_gated_rule(function: Any) -> None:
    plain = case("gated_delta_rule", 16, (0, 100))
    inputs = {name: x.float() for name, x in plain.inputs.items()}
    inputs |= {name: inputs[name].repeat_interleave(2, 2) for name in ("q", "k")}
    gates = {"g": inputs["g"][..., None].expand(1, 100, 4, 16)} if function is kda else {}
    o, _ = function(**{**inputs, **gates}, use_qk_l2norm_in_kernel=True)
    truth, _ = gated_delta_rule(**inputs, use_qk_l2norm_in_kernel=True, backend="reference")
    assert relative_error(o, truth) < 1e-6


@pytest.mark.parametrize("operator", OPERATORS)
def test_steps_are_the_scan(operator: str) -> None:
    torch.manual_seed(2)
    step = {"gated_delta_rule": gated_delta_rule_step, "kda": kda_step, "rwkv7": rwkv7_step}[operator]
    scan = {"gated_delta_rule": gated_delta_rule, "kda": kda, "rwkv7": rwkv7}[operator]
    inputs = {name: x.float() for name, x in case(operator, 8, (0, 9)).inputs.items()}
    state = inputs.pop("initial_state").clone()
    norm = {} if operator == "rwkv7" else {"use_qk_l2norm_in_kernel": True}
    o, final = scan(**inputs, initial_state=state.clone(), output_final_state=True, **norm)
    for t in range(9):
        one = step(**{name: x[:, t] for name, x in inputs.items()}, state=state, **norm)
        assert relative_error(one, o[:, t]) < 1e-5
    assert final is not None
    assert relative_error(state, final) < 1e-5


def test_nothing_at_all() -> None:
    empty = {name: x[:, :0].float() for name, x in case("gated_delta_rule", 8, (0, 9)).inputs.items()}
    state = torch.randn(1, 4, 8, 8)
    o, final = gated_delta_rule(**{**empty, "initial_state": state}, output_final_state=True)
    assert o.shape == (1, 0, 4, 8)
    assert final is not None
    assert torch.equal(final, state)


def _call(**changes: Any) -> Any:
    T, H = 6, 2
    given: dict[str, Any] = {
        **{"q": torch.randn(1, T, H, 8), "k": torch.randn(1, T, H, 8), "v": torch.randn(1, T, 4, 8)},
        **{"g": -torch.rand(1, T, 4), "beta": torch.rand(1, T, 4)},
    }
    return gated_delta_rule(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"k": torch.randn(1, 6, 2, 9)}, r"k is of shape \[1, 6, 2, 9\], expected \[B, T, H, K\] with .*K=8"),
        (
            {"v": torch.randn(1, 6, 3, 8), "g": torch.randn(1, 6, 3), "beta": torch.randn(1, 6, 3)},
            "v is of 3 heads, expected a multiple of k's 2",
        ),
        ({"g": torch.randn(1, 6, 2)}, "g is of shape"),
        ({"k": torch.randn(1, 6, 2, 8).half()}, "k is torch.float16, expected torch.float32"),
        ({"beta": torch.ones(1, 6, 4, dtype=torch.int64)}, "beta is torch.int64"),
        ({"initial_state": torch.randn(2, 4, 8, 8)}, r"initial_state is of shape .* with N=1"),
        ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, "cu_seqlens is falling at 2: 4 then 2"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "from 0 to 4, expected from 0 to T = 6"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "int32 or int64"),
        ({"backend": "cuda"}, "requested is 'cuda'"),
        (
            {"q": torch.randn(1, 6, 2, 257), "k": torch.randn(1, 6, 2, 257)},
            "k is of head size 257, expected a head size of 1 to 256",
        ),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        _call(**changes)


def test_a_half_state_is_refused() -> None:
    given = {name: x[:, 0].float() for name, x in case("kda", 8, (0, 1)).inputs.items() if name != "initial_state"}
    with pytest.raises(ArgumentError, match="half precision"):
        kda_step(**given, state=torch.zeros(1, 2, 8, 8, dtype=torch.bfloat16))


def test_gradients_in_a_batch_of_strided_inputs() -> None:
    """Inputs as a model hands them over: slices of one projection, transposed."""
    torch.manual_seed(3)
    whole = torch.randn(2, 24 + 24 + 32, 70, requires_grad=True)
    results = []
    for backend in ("cpu", "reference"):
        q, k, v = (x.transpose(1, 2) for x in whole.split((24, 24, 32), 1))
        q, k, v = q.unflatten(2, (3, 8))[:, :, 1:], k.unflatten(2, (3, 8))[:, :, :2], v.unflatten(2, (4, 8))
        g, beta = -F.softplus(v[..., 0]), torch.sigmoid(v[..., 1])
        o, _ = gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, backend=backend)
        (gradient,) = torch.autograd.grad(o.square().sum(), whole)
        results.append((o.detach(), gradient))
    for found, truth in zip(*results, strict=True):
        assert relative_error(found, truth) < 1e-5


@pytest.mark.parametrize("operator", [*OPERATORS, "ssd", "causal_conv1d"])
def test_autocast_does_not_reach_inside(operator: str) -> None:
    """Under autocast, matrix products of an operator that does not switch it off are rounded to half."""
    plain = case(operator, 16, (0, 100))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_matches(plain, "cpu", torch.float32)
