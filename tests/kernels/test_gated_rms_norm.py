"""Gated RMSNorm against its formula and transformers' layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from operator_checks import assert_matches

from halftune_kernels.arguments import ArgumentError
from halftune_kernels.cases import case
from halftune_kernels.ops.gated_rms_norm import gated_rms_norm, reference
from halftune_kernels.ops.gated_rms_norm.cpu import GatedNorm
from halftune_kernels.selfcheck import relative_error

FORMS = [(act, first) for act in ("silu", "sigmoid") for first in (True, False)]


@pytest.mark.parametrize(("activation", "first"), FORMS)
def test_reference_gradients(activation: str, first: bool) -> None:
    torch.manual_seed(0)
    given = tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 8), (8,), (3, 8)))
    assert torch.autograd.gradcheck(
        lambda x, weight, gate: reference.gated_rms_norm(
            GatedNorm(x, weight, gate, 1e-6, activation == "sigmoid", first, 4, torch.float64)
        ),
        given,
    )


@pytest.mark.parametrize(("activation", "first"), FORMS)
@pytest.mark.parametrize("gated", [True, False])
def test_cpu_is_the_formula(activation: str, first: bool, gated: bool, poisoned: None) -> None:
    plain = case("gated_rms_norm", 96, (0, 400))  # more rows than one block holds
    inputs = {name: x for name, x in plain.inputs.items() if gated or name != "gate"}
    options = {"activation": activation, "norm_before_gate": first, "group_size": 32, "eps": 1e-5}
    assert_matches(dataclasses.replace(plain, inputs=inputs, options=options), "cpu", torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cpu_in_each_dtype(dtype: torch.dtype, poisoned: None) -> None:
    assert_matches(case("gated_rms_norm", 100), "cpu", dtype)


def test_layers_of_transformers() -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    torch.manual_seed(0)
    x, gate = torch.randn(2, 7, 32), torch.randn(2, 7, 32)
    for layer, options in (
        (Qwen3NextRMSNormGated(32), {}),
        (KimiLinearRMSNormGated(32), {"activation": "sigmoid"}),
        (Zamba2RMSNormGated(32, group_size=8), {"norm_before_gate": False, "group_size": 8}),
    ):
        torch.nn.init.normal_(layer.weight)
        ours = gated_rms_norm(x, layer.weight, gate, **options)  # type: ignore[arg-type]
        assert relative_error(ours, layer(x, gate)) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4)}, "weight is of shape [4], expected [D] with D=6"),
        ({"gate": torch.zeros(3, 6)}, "gate is of shape [3, 6], expected [2, 6], as x has"),
        ({"group_size": 4}, "group_size is 4, expected a divisor of D = 6"),
        ({"activation": "relu"}, "activation is 'relu', expected one of 'silu', 'swish', 'sigmoid'"),
        ({"x": torch.zeros(2, 6, dtype=torch.int64)}, "x is torch.int64, expected a floating-point dtype"),
    ],
)
def test_complaints_name_the_argument(change: dict[str, object], message: str) -> None:
    arguments = {"x": torch.zeros(2, 6), "weight": torch.zeros(6), "gate": torch.zeros(2, 6)} | change
    with pytest.raises(ArgumentError) as caught:
        gated_rms_norm(**arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)
