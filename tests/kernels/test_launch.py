"""Which instructions a kernel's products are compiled to on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from halftune_kernels.cases import case
from halftune_kernels.launch import standing_in


@pytest.mark.parametrize(("operator", "capability", "chained"), [
    ("ssd", 90, True), ("gated_delta_rule", 90, True), ("kda", 90, True), ("rwkv7", 90, True),
    ("ssd", 80, False), ("ssd", 100, False), ("adapted_activation", 90, True), ("gated_rms_norm", 90, False),
])  # fmt: skip
def test_chained_products_on_hopper_do_not_use_wgmma(operator: str, capability: int, chained: bool) -> None:
    """With it, Triton 3.6.0 made kernels that read shared memory that was not theirs."""
    seen: dict[str, bool] = {}

    def start(kernel: Any, *_: Any) -> None:
        seen[kernel.fn.__name__] = os.environ.get("DISABLE_MMA_V3") == "1"

    with standing_in(capability, start):
        case(operator, 16, (0, 3)).call(torch.bfloat16, torch.device("cpu"), "triton")
    assert len(seen) > 1
    assert set(seen.values()) == {chained}
    assert "DISABLE_MMA_V3" not in os.environ
