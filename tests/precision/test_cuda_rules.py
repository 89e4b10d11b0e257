"""CUDA autocast's rules on CPU tensors: torch's own lists, their effect, and that nothing is left behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from halftune.precision.trace.cuda_rules import FP32, FP32_RESULT, LOWER, PROMOTE, cuda_autocast_rules

BF16, F32 = torch.bfloat16, torch.float32
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


@pytest.mark.skipif(not HEADER.is_file(), reason="this torch came without its headers")
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="the lists are those of torch 2.13")
@pytest.mark.parametrize(
    ("name", "ours"),
    [("LOWER_PRECISION_FP", LOWER), ("FP32", FP32), ("FP32_SET_OPT_DTYPE", FP32_RESULT), ("PROMOTE", PROMOTE)],
)
def test_the_lists_are_torchs_own(name: str, ours: tuple[str, ...]) -> None:
    block = re.search(rf"#define AT_FORALL_{name}\(_\)(.*?)\n\n", HEADER.read_text(), re.S)
    assert block is not None
    theirs = [entry.replace(", ", ".") for entry in re.findall(r"_\(([^()]*)\)", block.group(1))]
    assert sorted(ours) == sorted(theirs)


Call = Callable[[torch.Tensor], torch.Tensor]
CASES: dict[str, tuple[Call, torch.dtype, torch.dtype]] = {
    # name → call on a bf16 [4, 8], dtype under the CPU's autocast, under CUDA's
    "normalize": (lambda x: F.normalize(x, dim=-1), BF16, F32),
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), BF16, F32),
    "rms_norm": (lambda x: F.rms_norm(x, (8,)), BF16, F32),
    "softmax": (lambda x: x.softmax(-1), BF16, F32),
    "softmax with a dtype": (lambda x: x.softmax(-1, dtype=BF16), BF16, BF16),
    "log_softmax": (lambda x: F.log_softmax(x, -1), BF16, F32),
    "pow": (lambda x: x.pow(2), BF16, F32),
    "rsqrt": (lambda x: x.abs().rsqrt(), BF16, F32),
    "exp": (lambda x: x.exp(), BF16, F32),
    "softplus": (F.softplus, BF16, F32),
    "cumsum": (lambda x: x.cumsum(0), BF16, F32),
    "sum": (lambda x: x.sum(-1), BF16, F32),
    "norm": (lambda x: x.norm(dim=-1), BF16, F32),
    "addcmul": (lambda x: torch.addcmul(x, x, torch.ones(8)), F32, F32),
    "mean": (lambda x: x.mean(-1), BF16, BF16),
    "sigmoid": (lambda x: x.sigmoid(), BF16, BF16),
    "silu": (F.silu, BF16, BF16),
    "mul by fp32": (lambda x: x * torch.ones(8), F32, F32),
    "linear of fp32": (lambda x: F.linear(x.float(), torch.ones(3, 8)), BF16, BF16),
    "einsum of fp32": (lambda x: torch.einsum("ab,cb->ac", x.float(), x.float()), BF16, BF16),
    "sdpa of fp32": (lambda x: F.scaled_dot_product_attention(*[x.float()[None]] * 3), BF16, BF16),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(4)), F32, F32),
    "quantile's own list": (lambda x: torch.stack([x, x]), BF16, BF16),
}


@pytest.mark.parametrize("name", CASES)
def test_each_operation_on_both_sides(name: str) -> None:
    call, on_cpu, on_cuda = CASES[name]
    x = torch.randn(4, 8).to(BF16)
    with torch.autocast("cpu", dtype=BF16):
        assert call(x).dtype == on_cpu
        with cuda_autocast_rules():
            assert call(x).dtype == on_cuda
        assert call(x).dtype == on_cpu, "as before"


def test_gradients_come_back_in_the_leafs_dtype() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    half = x.detach().to(BF16).requires_grad_()
    with cuda_autocast_rules(), torch.autocast("cpu", dtype=BF16):
        out = F.normalize(F.linear(x, torch.eye(8)), dim=-1) * F.normalize(half, dim=-1)
        out.sum().backward()
    assert out.dtype == F32
    assert x.grad is not None
    assert half.grad is not None
    assert (x.grad.dtype, half.grad.dtype) == (F32, BF16)


def test_without_autocast_nothing_changes() -> None:
    x = torch.randn(4, 8).to(BF16)
    with cuda_autocast_rules():
        assert F.layer_norm(x, (8,)).dtype == BF16
        with torch.autocast("cpu", enabled=False):
            assert x.softmax(-1).dtype == BF16
