"""Layers of flash-linear-attention itself, in a checkpoint whose own code imports them: traced and guarded."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from standins.flash import HERE, fla_installed
from standins.remote_code_models import stranger
from tiny_model import because, plan, section

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.run import RunConfig
from halftune.core.errors import DtypeContractError
from halftune.doctor import inputs
from halftune.doctor.trace_model import TraceReport, trace_model
from halftune.hardware.catalogue import lookup
from halftune.model.attention.register import current_guard
from halftune.model.load.load import load_model
from halftune.plan import Plan, resolve
from halftune.precision.dtypes import autocast
from halftune.precision.trace.skip_kernels import skip_triton_kernels

pytestmark = pytest.mark.usefixtures("own_module_cache")

LAYER = {
    "imports": "from fla.layers.rwkv7 import RWKV7Attention",
    "made": "self.mixer = RWKV7Attention(width, self.heads)",
    "attended": "out = self.mixer(x)",
}
BF16 = torch.bfloat16


@pytest.fixture
def calls() -> Iterator[list]:
    with fla_installed() as found:
        yield found


def examined(folder: Path, at: Path) -> TraceReport:
    tree = {
        "model": {"name_or_path": str(folder), "trust_remote_code": True, "tokenizer": "builtin:qwen2-tiny"},
        "precision": "bf16",
        "adapter": "none",
        "data": {"train": "builtin:python-docs"},
        "training": {"output_dir": "run"},
    }
    (at / "look.yaml").write_text(json.dumps(tree))
    config: RunConfig = load_config(at / "look.yaml").run
    return trace_model(config, resolve(config, lookup("a100"), read_model_facts(config.model)))


def masters(guard: str = "cast") -> Plan:
    """bf16 compute on fp32 masters: the vectors of the layer stay fp32."""
    planned = plan("bf16", "fp32")
    planned = replace(planned, precision=replace(planned.precision, storage=because("fp32")))
    return replace(planned, attention=replace(planned.attention, guard=guard))


def test_the_doctor_names_the_line_of_the_package(calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "TOKENS", 4)  # the operator is run in full
    found = examined(stranger(tmp_path / "model", **LAYER).folder, tmp_path)
    assert found.calls == {"linear attention, train": 2, "linear attention, chat": 2}
    file = HERE / "linear" / "fla" / "layers" / "rwkv7.py"
    (line,) = [at for at, text in enumerate(file.read_text().splitlines(), 1) if text.endswith("# promotes k")]
    by_operand = {finding.operand: finding for finding in found.violations}
    assert sorted(by_operand) == ["a", "b", "k"]
    k = by_operand["k"]
    assert (k.file, k.line, k.target) == (str(file), line, "linear attention")
    assert (k.site, k.guard) == ("blocks.*.mixer", "casts k to bf16")


def test_the_guard_stands_there(calls, tmp_path: Path) -> None:
    planned = masters()
    model = load_model(section(stranger(tmp_path / "model", **LAYER).folder, trust_remote_code=True), planned)
    raw = importlib.import_module("fla.layers.rwkv7").chunk_rwkv7
    current_guard().watch(model)
    calls.clear()
    with autocast(planned.precision, torch.device("cpu")):
        model(input_ids=torch.arange(8).reshape(2, 4)).logits.float().square().mean().backward()
    assert calls == [(BF16,) * 5] * 2
    sites = {site["site"]: site for site in current_guard().report()["sites"]}
    assert list(sites) == ["blocks.0.mixer", "blocks.1.mixer"]
    assert sites["blocks.0.mixer"]["arrived"] == "r bf16, k fp32, v bf16, a fp32, b fp32"
    assert importlib.import_module("fla.layers.rwkv7").chunk_rwkv7 is raw
    assert all(parameter.grad.isfinite().all() for name, parameter in model.named_parameters() if "mixer" in name)


def test_strict_refuses_there(calls, tmp_path: Path) -> None:
    planned = masters("strict")
    model = load_model(section(stranger(tmp_path / "model", **LAYER).folder, trust_remote_code=True), planned)
    with autocast(planned.precision, torch.device("cpu")), pytest.raises(DtypeContractError, match="linear attention"):
        model(input_ids=torch.arange(8).reshape(2, 4))


def test_a_kernel_is_not_launched_in_a_trace() -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")

    @triton.jit
    def kernel(x: int) -> None:
        pass

    launched = type(kernel).__getitem__
    with skip_triton_kernels():
        assert kernel[(1,)](torch.zeros(1)) is None
    assert type(kernel).__getitem__ is launched


@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("fla", "einops")), reason="flash-linear-attention is missing"
)
def test_the_package_itself_can_be_traced(tmp_path: Path) -> None:
    """Its layers launch kernels, which a trace leaves out: what they fill has its dtype from the package's own code."""
    made = "self.mixer = RWKV7Attention(hidden_size=width, head_dim=self.size, layer_idx=index, num_hidden_layers=2)"
    attended = "out, *_ = self.mixer(x, v_first=v.flatten(2))"
    code = {**LAYER, "made": made, "attended": attended}
    found = examined(stranger(tmp_path / "model", **code).folder, tmp_path)
    assert found.calls == {"linear attention, train": 2, "linear attention, chat": 2}
    named = {(one.operand, Path(one.file).parts[-3:]) for one in found.violations}
    assert all(file[0] == "fla" for _, file in named), named
