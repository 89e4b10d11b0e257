"""The FLOPs that the paper profiler counts for the kernels of linear attention, against the products that they form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from interpreter import interpreting
from operator_checks import CPU
from triton.runtime import interpreter

from halftune.bench.paper.scans import _PRODUCTS, scan_flops
from halftune_kernels.cases import case

OPERATORS = ("gated_delta_rule", "ssd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("kda", "rwkv7")))
BOUNDS = (0, 64)  # a whole chunk: kernels multiply empty rows, too


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[tuple[str, str], float, float]]]:
    """The kernels that ran: package and name, FLOPs of their products, FLOPs as counted on paper."""
    found: list[tuple[tuple[str, str], float, float]] = []
    with interpreting():
        dot, run, products = interpreter.InterpreterBuilder.create_dot, interpreter.GridExecutor.__call__, [0.0]

        def counting(self: Any, a: Any, b: Any, *others: Any) -> Any:
            products[0] += 2.0 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
            return dot(self, a, b, *others)

        def running(self: Any, *args: Any, **sizes: Any) -> None:
            products[0] = 0.0
            run(self, *args, **sizes)
            module, name = self.fn.__module__, self.fn.__name__
            found.append(((module.split(".")[-2], name), products[0], scan_flops(module, name, args, sizes)))

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", counting)
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", running)
        yield found


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_flops_of_each_kernel_are_those_of_its_products(operator: str, formed: list[Any]) -> None:
    made = case(operator, 16, BOUNDS)
    made.call(torch.float32, CPU, "triton")
    assert {kernel for kernel, _, _ in formed} >= {kernel for kernel in _PRODUCTS if kernel[0] == operator}
    assert ("scan" in {kernel[0] for kernel, flops, _ in formed if flops}) == (operator in ("kda", "rwkv7"))
    for kernel, products, counted in formed:
        assert counted == products, kernel
