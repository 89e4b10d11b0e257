"""Families out of the ordinary, from recipe to result: mixtures of experts, attention of their own, softcap, sinks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from halftune.core.errors import PlanError
from halftune.export.merged import export_run
from halftune.infer.session import open_session
from halftune.model.adapters import load_adapter
from halftune.model.attention.packing_check import packing_verdict
from halftune.model.files.architectures import no_progress_bars
from halftune.model.load.load import load_model
from halftune.model.result.completed_run import open_run
from halftune.train.trainer import train

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {
    **GROUPED,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [1]},
    "olmoe": EXPERTS,
    "qwen3_next": {**EXPERTS, **LINEAR, "full_attention_interval": 3},
    "gpt_oss": EXPERTS,
}
PLAIN: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 4},
    "falcon": {"multi_query": True},
    "bloom": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
}
OWN = {"gptj", "falcon", "bloom"}
CAPPED: dict[str, dict[str, Any]] = {
    "gemma2": {**GROUPED, "sliding_window": 16, "attn_logit_softcapping": 5.0},
    "gpt_oss": {**EXPERTS, "sliding_window": 16},
}
IDS = torch.arange(3, 43).reshape(2, 20)


def checkpoint(folder: Path, kind: str, sizes: dict[str, Any]) -> Path:
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **sizes), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.5 * parameter.shape[-1] ** -0.5)
        model.save_pretrained(folder)
    return folder


@pytest.fixture
def run_of(recipe: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """``run_of(kind, sizes, "key=value", …)`` → (loaded config, plan) of two steps on a tiny model of that family."""

    def make(kind: str, sizes: dict[str, Any], *overrides: str, steps: int = 2) -> Any:
        folder = tmp_path / kind
        if not folder.exists():
            checkpoint(folder, kind, sizes)
        model = (f"model.name_or_path={folder}", "model.tokenizer=builtin:qwen2-tiny")
        return recipe(*model, f"training.max_steps={steps}", "training.learning_rate=0.02", *overrides)

    return make


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def distance(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||, in float64."""
    return float((out.double() - reference.double()).norm() / reference.double().norm())


def plain(folder: Path) -> PreTrainedModel:
    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", MIXTURES)
def test_lora_of_a_mixture_is_as_planned_and_loads_in_plain_peft(run_of: Any, kind: str, dropout: float) -> None:
    loaded, plan = run_of(kind, MIXTURES[kind], f"adapter.dropout={dropout}", "data.packing=auto")
    result = train(loaded, plan).folder
    run = open_run(str(result))
    base = plain(loaded.run.model.name_or_path)
    before = logits(base)
    adapted = PeftModel.from_pretrained(base, str(result / "final"))
    theirs = logits(adapted)
    made = sum(parameter.numel() for name, parameter in adapted.named_parameters() if ".lora_" in name)
    assert made == plan.num_trainable.value
    assert float((theirs - before).norm() / before.norm()) > 1e-3, "the adapter does something"
    ours = logits(load_adapter(load_model(run.result, run.plan, for_training=False), run.final, run.plan))
    adapted.set_experts_implementation("eager")  # grouped matrix products know no float64
    exact = logits(adapted.double())
    assert distance(ours, exact) < 3 * distance(theirs, exact), "as far from float64 as an fp32 run of plain peft"
    if kind == "qwen3_next":
        config = json.loads((result / "final" / "adapter_config.json").read_text())
        assert any("shared_expert.gate_proj" in name for name in config["target_parameters"])
        assert not any("shared_expert.gate_proj" in name for name in config["target_modules"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixtures_adapter_merges_and_answers(run_of: Any, tmp_path: Path, kind: str) -> None:
    loaded, plan = run_of(kind, MIXTURES[kind], "generation.max_new_tokens=4")
    result = train(loaded, plan).folder
    run = open_run(str(result))
    assert isinstance(open_session(run).answer("Add [1, 2].", tuned=True), str)
    exported = export_run(run, tmp_path / "merged", "fp32")
    assert exported.merge is not None
    assert exported.merge.update_size > 1e-4
    adapted = PeftModel.from_pretrained(plain(loaded.run.model.name_or_path), str(result / "final"))
    a, b = logits(plain(tmp_path / "merged")), logits(adapted)
    assert float((a - b).norm() / b.norm()) < 1e-5


@pytest.mark.parametrize("targets", [r".*\.(q_proj|up_proj|down_proj)", "[gate_proj]"])
def test_targets_written_out_mean_linear_layers_in_a_mixture_too(run_of: Any, targets: str) -> None:
    """Of the dense layer alone; peft would take these names for the experts, or refuse half a pair."""
    loaded, plan = run_of("qwen3_moe", MIXTURES["qwen3_moe"], f"adapter.target_modules={targets}")
    result = train(loaded, plan).folder
    adapted = PeftModel.from_pretrained(plain(loaded.run.model.name_or_path), str(result / "final"))
    names = [name for name, _ in adapted.named_parameters() if ".lora_A" in name]
    assert sum(p.numel() for n, p in adapted.named_parameters() if ".lora_" in n) == plan.num_trainable.value
    assert not [name for name in names if "experts" in name]
    assert any("layers.1.mlp" in name for name in names)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_families_with_or_without_attention_of_their_own_train_and_answer(
    run_of: Any, losses: Any, kind: str, adapter: str
) -> None:
    section = "adapter.type=lora" if adapter == "lora" else "adapter=none"
    loaded, plan = run_of(kind, PLAIN[kind], section, "data.packing=auto", "generation.max_new_tokens=4")
    assert plan.attention.provider.value == ("model" if kind in OWN else "torch")
    if kind in OWN:
        assert "attention code" in plan.attention.softmax.reason
        assert plan.batch.packing.value is False
    result = train(loaded, plan).folder
    assert len(losses(result)) == 2
    run = open_run(str(result))
    assert isinstance(open_session(run).answer("Add [1, 2].", tuned=True), str)


def test_packing_a_family_with_attention_of_its_own_is_refused(run_of: Any) -> None:
    with pytest.raises(PlanError, match="gptj"):
        run_of("gptj", PLAIN["gptj"], "data.packing=true")


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAPPED)
def test_softcap_and_sinks_are_packed_on_a_cpu(run_of: Any, losses: Any, tmp_path: Path, kind: str) -> None:
    """Plan, start-up check and training agree: the first step's loss is that of padded rows."""
    whole = ("training.per_device_train_batch_size=96", "adapter=none")
    curves, fed = [], []
    for packing in ("auto", "false"):
        out = f"training.output_dir={tmp_path}/{packing}"
        loaded, plan = run_of(kind, CAPPED[kind], *whole, out, f"data.packing={packing}", steps=1)
        assert plan.attention.softmax.value == "eager"
        if packing == "auto":
            assert plan.batch.packing.value, plan.batch.packing.reason
            assert plan.attention.varlen.value == "segments"
            verdict = packing_verdict(AutoConfig.from_pretrained(loaded.run.model.name_or_path), plan)
            assert verdict.value, verdict.reason
        folder = train(loaded, plan).folder
        curves.append(losses(folder))
        fed.append(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["tokens"])
    assert fed[0] < fed[1], "packed rows are nearly free of padding"
    assert abs(curves[0][0] - curves[1][0]) < 1e-5 * curves[1][0]
