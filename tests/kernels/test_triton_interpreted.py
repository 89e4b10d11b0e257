"""The Triton kernels, forward and backward, run by Triton's interpreter on the CPU against the fp64 references."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from interpreter import interpreting
from operator_checks import CPU

from halftune_kernels import selfcheck
from halftune_kernels.cases import Case, case, rounded
from halftune_kernels.ops.gated_rms_norm import gated_rms_norm
from halftune_kernels.selfcheck import BOUNDS, bound, relative_error

DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
SIZES = [  # of heads, with columns to be masked; a power of two, which has none, is that of the tests without extras
    (48, torch.float32),
    pytest.param(48, torch.bfloat16, marks=pytest.mark.slow),
    pytest.param(48, torch.float16, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def _interpreted(poisoned: None) -> Iterator[None]:
    with interpreting():
        yield


def check(plain: Case, dtype: torch.dtype) -> None:
    """Outputs and every gradient within the self-check's bounds."""
    made = rounded(plain, dtype)
    truth, found = made.call(torch.float64, CPU, "reference"), made.call(dtype, CPU, "triton")
    assert found.keys() == truth.keys()
    errors = {name: relative_error(value, truth[name]) / bound(name, dtype) for name, value in found.items()}
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [True, False])
def test_gated_rms_norm(dtype: torch.dtype, first: bool) -> None:
    plain = case("gated_rms_norm", 96, (0, 30))
    check(dataclasses.replace(plain, options={"norm_before_gate": first, "group_size": 48}), dtype)


@pytest.mark.parametrize("gated", [True, False])
def test_gated_rms_norm_with_a_sigmoid(gated: bool) -> None:
    plain = case("gated_rms_norm", 20, (0, 7))
    inputs = {name: x for name, x in plain.inputs.items() if gated or name != "gate"}
    check(dataclasses.replace(plain, inputs=inputs, options={"activation": "sigmoid"}), torch.float32)


@pytest.mark.parametrize("first", [True, False])
def test_gated_rms_norm_of_slices(first: bool) -> None:
    """Input and gate are columns of wider projections, of other dtypes, as after a scan in fp32; a frozen weight."""
    wide = torch.randn(9, 3, 40), torch.randn(9, 70).bfloat16()
    results = []
    for backend, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        x, gate = wide[0].to(dtype)[:, 1, 3:23].requires_grad_(), wide[1].to(dtype)[:, 31:51].requires_grad_()
        z = gate if backend == "reference" else gate.bfloat16()
        weight = torch.arange(1, 21, dtype=dtype)
        y = gated_rms_norm(x, weight, z, norm_before_gate=first, group_size=5, dtype=dtype, backend=backend)
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), (x, gate))))
    for found, truth in zip(results[1], results[0], strict=True):
        assert relative_error(found, truth) < (4e-3 if found is results[1][2] else 1e-5)  # the gate's is in bf16


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
def test_gated_rms_norm_without_an_epsilon() -> None:
    """Rows beyond the last are zeros, whose root mean square has no inverse: they must not reach the weight's sum."""
    check(dataclasses.replace(case("gated_rms_norm", 20, (0, 7)), options={"eps": 0.0}), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_conv1d(dtype: torch.dtype) -> None:
    check(case("causal_conv1d", 72, (0, 1, 3, 3, 70)), dtype)


def test_causal_conv1d_without_extras() -> None:
    plain = case("causal_conv1d", 16, (0, 5, 20))
    inputs = {name: plain.inputs[name] for name in ("x", "weight")}
    check(dataclasses.replace(plain, inputs=inputs, options=plain.options | {"activation": None}), torch.float32)


@pytest.mark.parametrize(("size", "dtype"), SIZES)
def test_gated_delta_rule(dtype: torch.dtype, size: int) -> None:
    check(case("gated_delta_rule", size, (0, 1, 65, 65, 100), seed=size), dtype)


def test_each_sample_of_a_row_has_its_own_state() -> None:
    """The samples' states stand one after the other, also that of an empty sample, for which nothing is computed."""
    check(case("gated_delta_rule", 16, (0, 1, 1, 20), seed=1), torch.float32)


@pytest.mark.parametrize(("size", "dtype"), SIZES)
def test_simple_decay(dtype: torch.dtype, size: int) -> None:
    check(case("ssd", size, (0, 1, 65, 65, 100), seed=size), dtype)


def test_simple_decay_without_extras() -> None:
    plain = case("ssd", 16, (0, 70))
    inputs = {name: plain.inputs[name] for name in ("q", "k", "v", "g")}
    check(dataclasses.replace(plain, inputs=inputs, options={}), torch.float32)


def test_gated_delta_rule_without_extras() -> None:
    plain = case("gated_delta_rule", 16, (0, 70))
    inputs = {name: x for name, x in plain.inputs.items() if name != "initial_state"}
    inputs["k"] = torch.nn.functional.normalize(inputs["k"], dim=-1)
    check(dataclasses.replace(plain, inputs=inputs, options={}), torch.float32)


def test_gated_delta_rule_of_one_repeated_key() -> None:
    """Beta 1 and no decay: the inverse by a power series would lose every digit here."""
    plain = case("gated_delta_rule", 16, (0, 64))
    inputs = plain.inputs | {
        "k": plain.inputs["k"][:, :1].expand(-1, 64, -1, -1).contiguous(),
        "g": torch.full_like(plain.inputs["g"], -1e-6),
        "beta": torch.ones_like(plain.inputs["beta"]),
    }
    check(dataclasses.replace(plain, inputs=inputs), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("operator", ["ssd", "gated_delta_rule"])
def test_the_gradient_of_a_fast_decay_among_slow_ones(operator: str, dtype: torch.dtype) -> None:
    """It is 1e-9 of the others' and has no part in what they add and take: each is right by itself, not only in sum."""
    plain = case(operator, 16, (0, 256), seed=5)
    inputs = {name: x if x.dim() < 3 else x[:, :, :1] for name, x in plain.inputs.items() if name != "initial_state"}
    inputs["g"] = -1e-2 * torch.rand(1, 256, 1, dtype=torch.float64)
    inputs["g"][:, 3::16] = -20
    made = rounded(dataclasses.replace(plain, inputs=inputs), dtype)
    truth, found = made.call(torch.float64, CPU, "reference")["d g"], made.call(dtype, CPU, "triton")["d g"]
    fast = torch.zeros(256, dtype=torch.bool)
    fast[3::16] = True
    assert truth[:, fast].norm() < 1e-6 * truth[:, ~fast].norm()
    for which in (fast, ~fast):
        assert relative_error(found[:, which] * 1e9, truth[:, which] * 1e9) <= BOUNDS[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["ssd", "gated_delta_rule"])
@pytest.mark.parametrize("fast", [-20.0, -200.0, -torch.inf])
def test_slow_decays_between_fast_ones_keep_their_digits(operator: str, fast: float) -> None:
    plain = case(operator, 16, (0, 130), seed=4)
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(2, *plain.inputs["g"].shape, generator=generator, dtype=torch.float64)
    gate = torch.where(uniform[0] < 0.3, fast, -1e-3 * uniform[1])
    made = rounded(dataclasses.replace(plain, inputs=plain.inputs | {"g": gate}, scalar_decay=""), torch.float32)
    truth, found = made.call(torch.float64, CPU, "reference"), made.call(torch.float32, CPU, "triton")
    assert max(relative_error(value, truth[name]) for name, value in found.items()) < 1e-6


@pytest.mark.parametrize("operator", ["gated_delta_rule", "kda"])
def test_value_heads_of_one_key_are_summed_before_they_are_rounded(operator: str) -> None:
    """Of one token without a state, a query's gradient lies along the key; the way back through the norm leaves what is
    across the query. Beside a key that is nearly the query, that is little of each head's part."""
    plain = case(operator, 48, (0, 1))
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, 1, *shape, generator=generator, dtype=torch.float64)

    key = normal(1, 48)
    inputs = {"q": key + 0.2 * normal(1, 48), "k": key, "v": normal(3, 32), "beta": normal(3).sigmoid()}
    inputs["g"] = -normal(3, 48).abs() if operator == "kda" else -normal(3).abs()
    check(dataclasses.replace(plain, inputs=inputs, scalar_decay=""), torch.bfloat16)


@pytest.mark.parametrize(
    ("operator", "decay", "dtype"),
    [
        ("ssd", "g", torch.float32),
        ("gated_delta_rule", "g", torch.float32),
        ("kda", "g", torch.float32),
        pytest.param("ssd", "g", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gated_delta_rule", "g", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("rwkv7", "w", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_reset_is_no_nan(operator: str, decay: str, dtype: torch.dtype) -> None:
    """A gate of 0 is a log decay of minus infinity: nothing passes, and the step learns nothing."""
    plain = case(operator, 16, (0, 1, 70))
    inputs = {name: x[:, :, :1] for name, x in plain.inputs.items() if name != "initial_state"}
    gate = inputs[decay].clamp(min=-1.0)
    for step in (0, 5, 6, 65):
        gate[:, step] = -torch.inf
    if gate.dim() == 4:  # of some channels
        gate[:, 20, :, ::2] = -torch.inf
    made = dataclasses.replace(plain, inputs=inputs | {decay: gate}, scalar_decay="")
    check(made, dtype)
    gradient = rounded(made, dtype).call(dtype, CPU, "cpu")[f"d {decay}"]
    assert gradient[gate == -torch.inf].abs().max() < 1e-15  # what rows add in fp64 and take again


@pytest.mark.slow
def test_the_self_check_sees_a_decay_gradient_that_is_a_difference_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernels once formed it: over all steps it is within the bounds, at the fast ones it is noise."""
    assert selfcheck.check("ssd", CPU, "triton", (16,)).passed
    kernels = importlib.import_module("halftune_kernels.ops.ssd.kernels")
    monkeypatch.setattr(kernels, "between", triton.jit(_difference))
    found = selfcheck.check("ssd", CPU, "triton", (16,))
    assert not found.passed
    assert found.detail.startswith("d exp(g) at fast steps float32")


def _difference(pairs, C: tl.constexpr):
    return tl.cumsum(tl.sum(pairs, 1) - tl.sum(pairs, 0), 0, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("operator", ["ssd", "gated_delta_rule", "kda", "rwkv7"])
def test_wide_heads(operator: str, size: int) -> None:
    """In fp32, with the cuts of these sizes: tiles of 8 values among them. One head of keys shows it."""
    values = 2 if operator in ("ssd", "gated_delta_rule") else 1
    check(case(operator, size, (0, 1, 3), seed=size, heads=(1, values)), torch.float32)
