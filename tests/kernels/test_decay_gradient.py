"""The gradient of a decay, summed over the tokens as a model's ``A_log`` and ``dt_bias`` see it, in fp32.

What the rows after a decay add to its gradient and take from it is large, and what is left is small: the two must
cancel exactly, or an error that all earlier rows share grows with the sum. The last digits are asked for here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from halftune_kernels.ops.gated_delta_rule import gated_delta_rule
from halftune_kernels.ops.kda import kda
from halftune_kernels.ops.rwkv7 import rwkv7
from halftune_kernels.ops.ssd import simple_decay

Inputs = dict[str, torch.Tensor]
BOUND = 5e-7  # sums in fp32 gave 1e-6 to 4e-6


def _delta(x: Inputs) -> torch.Tensor:
    return gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"], use_qk_l2norm_in_kernel=True)[0]


def _simple(x: Inputs) -> torch.Tensor:
    return simple_decay(x["q"], x["k"], x["v"], x["g"])[0]


def _by_channel(x: Inputs) -> torch.Tensor:
    return kda(x["q"], x["k"], x["v"], x["w"], x["beta"], use_qk_l2norm_in_kernel=True)[0]


def _generalised(x: Inputs) -> torch.Tensor:
    unit = torch.nn.functional.normalize(x["k"], dim=-1)
    return rwkv7(x["q"], x["w"], x["k"] * 0.2, x["v"], -unit, unit * x["beta"][..., None])[0]


@pytest.mark.parametrize("rate", [1.0, 8.0])
@pytest.mark.parametrize(
    ("operator", "decay", "heads"),
    [(_delta, "g", 32), (_simple, "g", 32), (_by_channel, "w", 4), (_generalised, "w", 4)],
)
def test_summed_over_tokens_it_keeps_its_digits(
    operator: Callable[[Inputs], torch.Tensor], decay: str, heads: int, rate: float
) -> None:
    shape = (1, 300, heads)
    drawn = {name: torch.randn(*shape, 32) for name in "qkv"}
    drawn |= {"g": -rate * torch.rand(shape), "beta": torch.rand(shape), "w": -rate * torch.rand(*shape, 32)}
    weight = torch.randn(*shape, 32)
    sums = []
    for dtype in (torch.float64, torch.float32):
        inputs = {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in drawn.items()}
        (operator(inputs) * weight.to(dtype)).sum().backward()
        gradient = inputs[decay].grad
        assert gradient is not None
        sums.append(gradient.double().sum(1))
    assert float((sums[1] - sums[0]).norm() / sums[0].norm()) < BOUND
