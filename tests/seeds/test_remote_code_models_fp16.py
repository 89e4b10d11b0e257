"""A foreign model in fp16: trained, evaluated, merged, and generated with, with autocast and without."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from standins.remote_code_models import stranger
from tiny_model import because, plan, section
from transformers import AttentionInterface

from halftune.config.sections.model import LoraAdapter, NoAdapter
from halftune.model.adapters import attach_adapter
from halftune.model.attention.register import current_guard, guarded_imports, registered_attention
from halftune.model.load.load import load_model
from halftune.precision.dtypes import autocast
from halftune.precision.patched import hold_while_running
from halftune.precision.rebind import as_installed

pytestmark = pytest.mark.usefixtures("own_module_cache")

HIDDEN: dict[str, Any] = {  # in a dict and in a partial: places that no look through a module's globals finds
    "imports": "import flash_attn.flash_attn_interface as interface\nKERNELS = {'flash': interface.flash_attn_func}",
    "made": """
        self.attend = functools.partial(KERNELS["flash"], causal=True)
        self.scale = nn.Parameter(torch.ones(self.size))
    """,
    "attended": "q = q * self.scale.float()  # promotes q\nout = self.attend(q, k, v)",
}


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


CALLED: dict[str, Any] = {  # by the name in its module, and once more in the backward pass
    "imports": "from flash_attn import flash_attn_func",
    "attended": """
        def attend(q, k, v):
            return flash_attn_func(q.float(), k, v, causal=True)
        out = checkpoint(attend, q, k, v, use_reentrant=False)
    """,
}


def loaded(folder: Path, compute: str, **code: Any) -> Any:
    planned = plan(compute, compute)
    return load_model(section(folder, trust_remote_code=True), planned, **code), planned


def run(model: Any, planned: Any) -> None:
    with autocast(planned.precision, torch.device("cpu")):
        loss = model(input_ids=torch.arange(8).reshape(2, 4)).logits.float().square().mean()
    loss.backward()


@pytest.mark.parametrize("code", [HIDDEN, CALLED], ids=["kept by the model", "called by name"])
def test_two_plans_of_one_process_do_not_meet(flash, tmp_path: Path, code: dict[str, Any]) -> None:
    """Each model computes by its own plan whenever it runs; nobody else ever meets what stands in for it."""
    import flash_attn  # pyright: ignore[reportMissingImports]

    raw = flash_attn.flash_attn_func
    folder = stranger(tmp_path / "model", **code).folder
    (wide, in_fp32), (half, in_bf16) = loaded(folder, "fp32"), loaded(folder, "bf16")
    assert flash_attn.flash_attn_func is raw
    for model, planned, seen in ((wide, in_fp32, 0), (half, in_bf16, 4), (wide, in_fp32, 4), (half, in_bf16, 8)):
        run(model, planned)
        assert flash_attn.flash_attn_func is raw
        counted = len(flash.calls) if code is CALLED else 2 * len(flash.calls)  # computed again in its backward pass
        assert counted == seen, "a plan in fp32 calls no kernel of the package"
    assert {dtypes for _, dtypes in flash.calls} == {(torch.bfloat16,) * 3}
    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        flash_attn.flash_attn_func(*[torch.randn(1, 4, 2, 8)] * 3)


def test_attention_of_a_later_plan_is_the_kernel_itself(flash, tmp_path: Path) -> None:
    """What checks before training registers plans of its own, after a model in fp32 was loaded in the same process."""
    model, in_fp32 = loaded(stranger(tmp_path / "model", **HIDDEN).folder, "fp32")
    run(model, in_fp32)
    standing = guarded_imports()
    later = replace(plan("bf16").attention, softmax=because("fa2"), provider=because("flash_attn"))
    later = replace(plan("bf16"), attention=replace(later, varlen=because("flash_attn_varlen")))
    query = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
    with standing, registered_attention(later) as name:
        AttentionInterface._global_mapping[name](torch.nn.Module(), query, query, query, None)
    assert flash.calls == [("flash_attn_varlen_func", (torch.bfloat16,) * 3)]


def test_a_part_that_is_called_by_itself_is_guarded(flash, tmp_path: Path) -> None:
    model, _ = loaded(stranger(tmp_path / "model", **CALLED).folder, "bf16")
    model.blocks[0](torch.randn(1, 4, 32, dtype=torch.bfloat16)).float().sum().backward()
    assert [dtypes for _, dtypes in flash.calls] == [(torch.bfloat16,) * 3] * 2


def test_a_backward_pass_that_fails_leaves_nothing_behind(flash, tmp_path: Path) -> None:
    import flash_attn  # pyright: ignore[reportMissingImports]

    raw = flash_attn.flash_attn_func
    model, _ = loaded(stranger(tmp_path / "model", **CALLED).folder, "bf16")

    def fail(gradient: torch.Tensor) -> None:
        raise MemoryError

    embedded = model.get_input_embeddings().weight.register_hook(fail)
    with pytest.raises(MemoryError):
        model(input_ids=torch.arange(4)[None]).logits.sum().backward()
    embedded.remove()
    with torch.no_grad():
        model(input_ids=torch.arange(4)[None])
    assert flash_attn.flash_attn_func is raw


@pytest.mark.slow
def test_compiled_code_is_guarded(flash, tmp_path: Path) -> None:
    model, planned = loaded(stranger(tmp_path / "model", **CALLED).folder, "bf16")
    model.compile(backend="eager")
    run(model, planned)
    run(model, planned)
    assert {dtypes for _, dtypes in flash.calls} == {(torch.bfloat16,) * 3}


def test_what_was_compiled_is_guarded_until_its_model_is_gone(flash, monkeypatch: pytest.MonkeyPatch) -> None:
    import flash_attn  # pyright: ignore[reportMissingImports]

    raw, model = flash_attn.flash_attn_func, torch.nn.Linear(2, 2)
    with registered_attention(plan("bf16")):
        hold_while_running(guarded_imports(), model)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    model(torch.ones(2))
    assert flash_attn.flash_attn_func is not raw
    with as_installed():
        assert flash_attn.flash_attn_func is raw
    assert flash_attn.flash_attn_func is not raw
    del model
    gc.collect()
    assert flash_attn.flash_attn_func is raw
