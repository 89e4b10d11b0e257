"""What the seed tests share: the stand-in of flash_attn, CUDA's casting rules, tracing a bare module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from standins.flash import flash_attn_installed
from tiny_model import plan
from torch import nn

from halftune.attention.contract import ENTRY_POINTS, ROTARY_ENTRY_POINT, EntryPoint
from halftune.precision.trace.cuda_rules import cuda_autocast_rules
from halftune.precision.trace.fake_tensors import FakeTensors
from halftune.precision.trace.findings import Finding, findings
from halftune.precision.trace.tracer import Tracer

HERE = Path(__file__).parent


@pytest.fixture
def flash() -> Iterator[ModuleType]:
    """The stand-in, importable as flash_attn; its ``pretend`` module."""
    with flash_attn_installed() as pretend:
        yield pretend


@pytest.fixture
def source() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a file beside this one afresh, so that it finds the flash_attn of the moment."""
    loaded = []

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"seed.modeling_{name}", HERE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        loaded.append(module.__name__)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in loaded:
        del sys.modules[name]


@pytest.fixture
def cuda_autocast() -> Callable:
    """``with cuda_autocast(torch.float16):`` on the CPU."""

    @contextmanager
    def entered(dtype: torch.dtype) -> Iterator[None]:
        with cuda_autocast_rules(), torch.autocast("cpu", dtype=dtype):
            yield

    return entered


@pytest.fixture
def traced() -> Callable[..., list[Finding]]:
    """Findings of one training step of a module, without numbers, under an fp16 or bf16 plan."""

    def trace(
        make: Callable[[], nn.Module],
        inputs: Callable[[], torch.Tensor],
        compute: str = "fp16",
        linear: tuple[EntryPoint, ...] = (),
    ) -> list[Finding]:
        precision = plan(compute, "fp32").precision
        tracer = Tracer(precision, functions=ENTRY_POINTS, rotary=(ROTARY_ENTRY_POINT,), linear=linear)
        with FakeTensors() as mode:
            model = make()
            mode.strip(model)
            with tracer.phase("train", model, grad=True):
                model(inputs()).float().sum().backward()
        return findings(tracer.arrivals, mode="cast", scale=1.0, objection=lambda arrival: "", training="train")

    return trace


@pytest.fixture
def line_of() -> Callable[[str, str], int]:
    """The number of the line of a file beside this one that carries a marker."""

    def find(name: str, marker: str) -> int:
        lines = (HERE / f"{name}.py").read_text().splitlines()
        (number,) = [at for at, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
        return number

    return find
