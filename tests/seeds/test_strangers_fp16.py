"""A foreign model in fp16: trained, evaluated, merged, and generated with, with autocast and without."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from standins.strangers import stranger
from tiny_model import because, plan, section
from transformers import dynamic_module_utils

from halftune.config.sections.adapter import LoraAdapter, NoAdapter
from halftune.model.adapters.attach import attach_adapter
from halftune.model.load import load_model
from halftune.model.patch import current_guard
from halftune.precision.dtypes import autocast
from halftune.precision.patched import unpatch

HIDDEN: dict[str, Any] = {  # in a dict and in a partial: places that no look through a module's globals finds
    "imports": "import flash_attn.flash_attn_interface as interface\nKERNELS = {'flash': interface.flash_attn_func}",
    "made": """
        self.attend = functools.partial(KERNELS["flash"], causal=True)
        self.scale = nn.Parameter(torch.ones(self.size))
    """,
    "attended": "q = q * self.scale.float()  # promotes q\nout = self.attend(q, k, v)",
}


@pytest.fixture(autouse=True)
def _modules_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    unpatch()


@pytest.mark.parametrize("adapter", [NoAdapter(type="none"), LoraAdapter(type="lora", rank=2)], ids=["full", "lora"])
def test_every_call_is_in_fp16(flash, tmp_path: Path, adapter: NoAdapter | LoraAdapter) -> None:
    full, cpu = adapter.type == "none", torch.device("cpu")
    planned = plan("fp16", "fp32")
    if full:
        planned = replace(planned, precision=replace(planned.precision, storage=because("fp32")))
    where = section(stranger(tmp_path / "model", **HIDDEN).folder, trust_remote_code=True)
    model: Any = attach_adapter(load_model(where, planned), adapter, planned, 0)
    ids = torch.arange(8).reshape(2, 4)
    with autocast(planned.precision, cpu):
        model(input_ids=ids).logits.float().square().mean().backward()
        with torch.no_grad():
            model.eval()(input_ids=ids)
    assert len(flash.calls) == 4, "two layers, in a step and in an evaluation inside the run"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in trained)
    merged = model if full else model.merge_and_unload()
    with autocast(planned.precision, cpu):
        merged.generate(ids[:1], max_new_tokens=1, do_sample=False)
    merged.generate(ids[:1], max_new_tokens=1, do_sample=False)
    assert len(flash.calls) == 8
    assert {dtypes for _, dtypes in flash.calls} == {(torch.float16,) * 3}
    assert current_guard().report()["casts"] == 8, "q strays in each"
