"""Fused experts: LoRA on them is peft's, and their quantisation on load leaves what the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_families import EXPERTS, IDS, MIXTURES, logits, plain, run_of  # noqa: F401  # a fixture

from halftune.core.errors import ConfigError, PlanError
from halftune.export.merged import export_run
from halftune.infer.session import open_session
from halftune.model.adapters import attach_adapter, load_adapter
from halftune.model.load.load import load_model
from halftune.model.result.completed_run import open_run
from halftune.train.trainer import train

BOTH = "adapter.target_parameters=[experts.gate_up_proj, experts.down_proj]"


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_lora_on_experts_resumes_merges_and_is_pefts(run_of: Any, tmp_path: Path, kind: str) -> None:  # noqa: F811
    asked = (BOTH, "adapter.rank=3", "precision=fp32", "training.save_steps=1", "generation.max_new_tokens=4")
    loaded, plan = run_of(kind, MIXTURES[kind], *asked, f"training.output_dir={tmp_path / 'whole'}")
    result = train(loaded, plan).folder
    rest = (f"training.output_dir={tmp_path / 'rest'}", f"training.resume={tmp_path}/whole/checkpoint-1")
    train(*run_of(kind, MIXTURES[kind], *asked, *rest))
    one, other = (load_file(tmp_path / place / "final" / "adapter_model.safetensors") for place in ("whole", "rest"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    base = plain(loaded.run.model.name_or_path)
    adapted = PeftModel.from_pretrained(base, str(result / "final"))
    made = {name: one.numel() for name, one in adapted.named_parameters() if ".lora_" in name}
    assert sum(made.values()) == plan.num_trainable.value
    assert any("experts" in name for name in made)
    theirs, run = logits(adapted), open_run(str(result))
    ours = logits(load_adapter(load_model(run.result, run.plan, for_training=False), run.final, run.plan))
    assert float((theirs - ours).norm() / ours.norm()) < 1e-6
    assert isinstance(open_session(run).answer("Add [1, 2].", tuned=True), str)
    exported = export_run(run, tmp_path / "merged", "fp32")
    assert exported.merge is not None
    assert exported.merge.update_size > 1e-4
    merged = logits(plain(tmp_path / "merged"))
    assert float((merged - theirs).norm() / theirs.norm()) < 1e-5


def test_gradients_of_experts_are_those_of_plain_peft(run_of: Any) -> None:  # noqa: F811
    alone = ("adapter.target_modules=[]", "precision=fp32", BOTH)
    loaded, plan = run_of("qwen3_moe", MIXTURES["qwen3_moe"], *alone)
    ours: Any = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    section = loaded.run.adapter
    config = LoraConfig(
        r=section.rank, lora_alpha=section.alpha, target_modules=[], target_parameters=[*section.target_parameters]
    )
    theirs: Any = get_peft_model(plain(loaded.run.model.name_or_path), config)
    weights = {name: one for name, one in theirs.named_parameters() if one.requires_grad}
    for name, one in ours.named_parameters():
        if one.requires_grad:
            one.data = torch.randn(one.shape) / 8
            weights[name].data = one.data.clone()
    for model in (ours, theirs):
        model(input_ids=IDS, labels=IDS).loss.backward()
    mine = {name: one for name, one in ours.named_parameters() if one.requires_grad}
    assert mine.keys() == weights.keys()
    for name, one in mine.items():
        wanted, gradient = weights[name].grad, one.grad
        # of the whole: an element whose terms cancel is wrong by the rounding of its terms
        assert float((gradient - wanted).norm() / wanted.norm()) < 1e-5


# int8: bitsandbytes' linear layers round their inputs to 8 bits, which a merged model's do not
@pytest.mark.parametrize(("method", "bound"), [("nf4", 1e-5), pytest.param("int8", 0.05, marks=pytest.mark.slow)])
def test_lora_on_quantised_experts_merges(run_of: Any, tmp_path: Path, method: str, bound: float) -> None:  # noqa: F811
    pytest.importorskip("bitsandbytes")
    sizes = {**EXPERTS, "moe_intermediate_size": 64}
    asked = (BOTH, f"model.quantization={method}", "model.quantize_experts=true", "precision=fp32", "adapter.rank=3")
    loaded, plan = run_of("qwen3_moe", sizes, *asked, "training.save_steps=1", f"training.output_dir={tmp_path}/whole")
    train(loaded, plan)
    rest = (f"training.output_dir={tmp_path / 'rest'}", f"training.resume={tmp_path}/whole/checkpoint-1")
    result = train(*run_of("qwen3_moe", sizes, *asked, *rest)).folder
    one, other = (load_file(tmp_path / place / "final" / "adapter_model.safetensors") for place in ("whole", "rest"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    run = open_run(str(result))
    ours = logits(load_adapter(load_model(run.result, run.plan, for_training=False), run.final, run.plan))
    exported = export_run(run, tmp_path / "merged", "fp32")
    assert exported.merge is not None
    assert exported.merge.update_size > 1e-4
    merged = logits(plain(tmp_path / "merged"))
    assert float((merged - ours).norm() / ours.norm()) < bound
    loads = PeftModel.from_pretrained(plain(loaded.run.model.name_or_path), str(result / "final"))
    assert all(torch.equal(loads.get_parameter(name.replace(".weight", ".default.weight")), one[name]) for name in one)


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_quantised_experts_train_resume_and_merge(run_of: Any, tmp_path: Path, method: str) -> None:  # noqa: F811
    pytest.importorskip("bitsandbytes")
    sizes = {**EXPERTS, "moe_intermediate_size": 64}
    asked = (f"model.quantization={method}", "model.quantize_experts=true", "precision=fp32", "training.save_steps=1")
    loaded, plan = run_of("qwen3_moe", sizes, *asked, f"training.output_dir={tmp_path / 'whole'}")
    model = load_model(loaded.run.model, plan)
    packed = {name: one for name, one in model.named_parameters() if "parametrizations" in name}
    assert len(packed) == 6
    assert {one.dtype for one in packed.values()} == {torch.uint8 if method == "nf4" else torch.int8}
    plain_plan = run_of("qwen3_moe", sizes, *asked[:1], "precision=fp32")[1]
    assert plan.memory.weights < plain_plan.memory.weights
    whole = plain(loaded.run.model.name_or_path)
    for name, weight in whole.named_parameters():
        if weight.ndim == 3:
            place, _, leaf = name.rpartition(".")
            error = getattr(model.get_submodule(place), leaf) - weight
            assert 0 < float(error.norm() / weight.norm()) < (0.12 if method == "nf4" else 0.01)
    result = train(loaded, plan).folder
    rest = (f"training.output_dir={tmp_path / 'rest'}", f"training.resume={tmp_path}/whole/checkpoint-1")
    train(*run_of("qwen3_moe", sizes, *asked, *rest))
    one, other = (load_file(tmp_path / place / "final" / "adapter_model.safetensors") for place in ("whole", "rest"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    exported = export_run(open_run(str(result)), tmp_path / "merged", "fp32")
    assert exported.merge is not None
    assert logits(plain(tmp_path / "merged")).isfinite().all()


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ((BOTH, "adapter.dropout=0.1"), "config.keys_conflict"),
        (("model.quantize_experts=true",), "config.no_effect"),
        (("adapter.target_parameters=[experts.gate_proj]",), "config.bad_target_modules"),
    ],
)
def test_what_cannot_be_is_refused_in_the_plan(run_of: Any, asked: tuple[str, ...], code: str) -> None:  # noqa: F811
    with pytest.raises((ConfigError, PlanError)) as refused:
        run_of("qwen3_moe", MIXTURES["qwen3_moe"], *asked)
    assert code in {getattr(refused.value, "code", "")} | {one.code for one in getattr(refused.value, "problems", ())}
