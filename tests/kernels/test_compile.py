"""Kernels compile for GPUs that are not here, within their shared memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from compile_check import compile_case

from halftune_kernels.cases import case
from halftune_kernels.gate import SHARED_MEMORY

SHORT = (0, 80)


@pytest.mark.parametrize("capability", [75, 90])
def test_gated_rms_norm(capability: int) -> None:
    found = compile_case(case("gated_rms_norm", 128, SHORT), torch.float16, capability)
    assert [kernel.kernel for kernel in found] == ["norm_forward", "norm_backward"]
    assert all(kernel.fits and not kernel.spills for kernel in found)


def test_causal_conv1d_in_half() -> None:
    """On sm_86 ptxas stops at 128 registers: with the 4 warps of other GPUs it spills there."""
    found = {kernel.kernel: kernel for kernel in compile_case(case("causal_conv1d", 32, SHORT), torch.bfloat16, 86)}
    assert found["conv_backward"].fits
    assert not found["conv_backward"].spills
    assert found["conv_backward"].cut == "R 16, BD 32, 8 warps"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 86, 90, 120])  # each size of shared memory, and the newest
@pytest.mark.parametrize("operator", ["gated_rms_norm", "causal_conv1d"])
def test_elementwise_operators_on_every_gpu(operator: str, capability: int) -> None:
    found = compile_case(case(operator, 128, SHORT), torch.float32, capability)
    assert all(kernel.fits and not kernel.spills for kernel in found)


def test_each_size_of_shared_memory_is_compiled_for() -> None:
    assert {SHARED_MEMORY[capability] for capability in (75, 80, 86, 90)} == set(SHARED_MEMORY.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "capability"), [("gated_delta_rule", 90), ("ssd", 120), ("kda", 90), ("rwkv7", 89)]
)
def test_operators_with_products(operator: str, capability: int) -> None:
    """One GPU each; ``scripts/bench/compile_table.py`` compiles all of them."""
    found = {kernel.kernel: kernel for kernel in compile_case(case(operator, 128, SHORT), torch.bfloat16, capability)}
    assert all(kernel.fits for kernel in found.values())
    assert all(found[name].tensor_cores for name in ("scan_forward", "scan_backward", "chunk_backward"))
    assert not any(found[name].spills for name in ("scan_forward", "scan_backward"))
