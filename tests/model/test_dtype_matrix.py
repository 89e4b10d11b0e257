"""Checkpoint dtype × precision × tuning: what is loaded, trained, saved and named is what the plan says.

The failure behind it (bf16 and flash attention chosen in a web board, and q, k, v in fp32 at the kernel) has no line
that promotes: weights were stored in fp32, and the forward pass ran outside of autocast. So there is no line to name;
what can be shown is that no cell of the table reaches attention, or a file, in another format than its plan's.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import checkpoint, finished_run

from halftune.config.builtin_models import VOCAB_SIZE
from halftune.config.facts.model import facts_from_config, read_model_facts
from halftune.config.run import RunConfig
from halftune.core.errors import PlanError
from halftune.export.merged import export_run
from halftune.hardware.catalogue import lookup
from halftune.infer.session import open_session
from halftune.model.adapters import attach_adapter
from halftune.model.load.load import load_model
from halftune.model.result.completed_run import open_run
from halftune.model.result.save import save_final
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import Plan, resolve
from halftune.precision.dtypes import CONFIG_NAMES, autocast
from halftune.precision.report import check_dtypes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IDS = torch.arange(20).reshape(2, 10)
# (machine, precision) → storage of the frozen base, saved dtype of a full model
CPU = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "bf16")}


def config(folder: Path, precision: object, adapter: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name_or_path": str(folder), "tokenizer": "builtin:qwen2-tiny"},
            "precision": precision,
            "adapter": adapter,
            "data": {"train": "rows.jsonl"},
            "training": {"output_dir": "run"},
        }
    )


def loaded(run: RunConfig, machine: str) -> tuple[Plan, torch.nn.Module]:
    plan = resolve(run, lookup(machine), read_model_facts(run.model))
    model = attach_adapter(load_model(run.model, plan), run.adapter, plan, 0)
    check_dtypes(model, plan.precision)
    return plan, model


@pytest.mark.parametrize(("own", "precision"), list(itertools.product(DTYPES, CPU)))
def test_lora(tmp_path: Path, own: str, precision: str) -> None:
    folder = checkpoint(tmp_path / "base", DTYPES[own])
    run = config(folder, precision, "lora")
    plan, model = loaded(run, "cpu")
    storage, _ = CPU[precision]
    frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    assert frozen == {DTYPES[storage]}
    assert trained == {torch.float32}
    reached = forward_dtypes(model, plan)
    assert reached == {DTYPES[precision]}, "what reaches attention is the plan's compute dtype"
    save_final(model, load_tokenizer(run.model), plan, tmp_path / "final")
    tensors = load_file(tmp_path / "final" / "adapter_model.safetensors").values()
    assert {tensor.dtype for tensor in tensors} == {DTYPES[plan.precision.saved.value]}


@pytest.mark.parametrize(("own", "precision"), list(itertools.product(DTYPES, CPU)))
def test_full(tmp_path: Path, own: str, precision: str) -> None:
    folder = checkpoint(tmp_path / "base", DTYPES[own])
    run = config(folder, precision, "none")
    plan, model = loaded(run, "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    original = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.get_parameter(name), original[name].float()), (
        "master weights are the checkpoint's, unrounded"
    )
    assert forward_dtypes(model, plan) == {DTYPES[precision]}
    save_final(model, load_tokenizer(run.model), plan, tmp_path / "final")
    _, saved = CPU[precision]
    assert {tensor.dtype for tensor in load_file(tmp_path / "final" / "model.safetensors").values()} == {DTYPES[saved]}
    named = json.loads((tmp_path / "final" / "config.json").read_text())["dtype"]
    assert named == str(DTYPES[saved]).removeprefix("torch.")


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_pinned_bf16_weights_are_trained_and_saved_in_bf16(tmp_path: Path, adapter: str) -> None:
    run = config(checkpoint(tmp_path / "base"), {"compute": "bf16", "trainable": "bf16"}, adapter)
    plan, model = loaded(run, "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (
        model.get_submodule("base_model.model" if adapter == "lora" else "").model.rotary_emb.inv_freq.dtype
        == torch.float32
    )
    assert forward_dtypes(model, plan) == {torch.bfloat16}


@pytest.mark.parametrize("own", sorted(DTYPES))
@pytest.mark.parametrize(("adapter", "frozen"), [("lora", torch.float16), ("none", None)])
def test_a_t4s_plan_loads_in_fp16_with_fp32_masters(tmp_path: Path, own: str, adapter: str, frozen) -> None:
    run = config(checkpoint(tmp_path / "base", DTYPES[own], like="qwen3_5-tiny"), "auto", adapter)
    plan, model = loaded(run, "t4")
    assert plan.precision.compute.value == "fp16"
    assert plan.precision.grad_scaler.value
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {
        p.dtype for n, p in model.named_parameters() if not p.requires_grad and "A_log" not in n and "dt_bias" not in n
    } == ({frozen} if frozen else set())
    assert {p.dtype for n, p in model.named_parameters() if "A_log" in n or "dt_bias" in n} == {torch.float32}


def forward_dtypes(model: torch.nn.Module, plan: Plan) -> set[torch.dtype]:
    """Dtypes of q, k and v as the model's projections leave them for attention."""
    seen: set[torch.dtype] = set()
    hooks = [
        module.register_forward_hook(lambda m, args, out: seen.add(out.dtype))
        for name, module in model.named_modules()
        if name.endswith(("q_proj", "k_proj", "v_proj"))
    ]
    with autocast(plan.precision, torch.device("cpu")):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert torch.isfinite(loss)
    for hook in hooks:
        hook.remove()
    return seen


FACTS = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "intermediate_size": 512,
}
CELLS = list(itertools.product(DTYPES, ("auto", "bf16", "fp16", "fp32"), ("none", "lora")))


@pytest.mark.parametrize(("own", "precision", "adapter"), CELLS)
@pytest.mark.parametrize("machine", ["a100", "t4", "cpu"])
def test_every_cell_is_right_or_refused_before_load(
    tmp_path: Path, own: str, precision: str, adapter: str, machine: str
) -> None:
    """What train, evaluate, chat and export compute in, and what they save, is one plan: never another dtype."""
    facts = facts_from_config({**FACTS, "dtype": str(DTYPES[own]).removeprefix("torch.")}, "here")
    run = config(tmp_path, precision, adapter)
    refused = {("t4", "bf16"), ("cpu", "fp16")}
    if (machine, precision) in refused:
        with pytest.raises(PlanError):
            resolve(run, lookup(machine), facts)
        return
    found = resolve(run, lookup(machine), facts).precision
    auto = {"a100": "bf16", "t4": "fp16", "cpu": "fp32"}[machine]
    compute = auto if precision == "auto" else precision
    assert found.compute.value == compute, "whatever the checkpoint's own dtype is"
    assert found.storage.value == (compute if adapter == "lora" else "fp32")
    assert found.trainable.value == "fp32"
    assert found.grad_scaler.value == (compute == "fp16")
    assert found.autocast.value == (compute != "fp32")
    assert found.saved.value in (compute, "fp32")


@pytest.mark.parametrize(("own", "precision", "adapter"), [*itertools.product(DTYPES, CPU, ("none", "lora"))])
def test_chat_and_export_compute_as_training_did(tmp_path: Path, own: str, precision: str, adapter: str) -> None:
    base = checkpoint(tmp_path / "base", DTYPES[own], vocab_size=VOCAB_SIZE)
    run = open_run(str(finished_run(tmp_path / "run", base, adapter=adapter, precision=precision)))
    assert run.plan.precision.compute.value == precision
    session = open_session(run)
    seen: set[torch.dtype] = set()
    projections = [m for name, m in session.model.named_modules() if name.endswith(("q_proj", "k_proj", "v_proj"))]
    for module in projections:
        module.register_forward_hook(lambda m, args, out: seen.add(out.dtype))
    session.answer("What is a list?", tuned=True)
    assert seen == {DTYPES[precision]}
    written = export_run(run, tmp_path / "exported")
    stored = {str(t.dtype).removeprefix("torch.") for t in load_file(written.folder / "model.safetensors").values()}
    assert stored == {CONFIG_NAMES[written.stored]}
    assert json.loads((written.folder / "config.json").read_text())["dtype"] == CONFIG_NAMES[written.stored]
