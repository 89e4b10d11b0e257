"""Merging layer by layer: the same bits as merging the whole model, in little memory, and a wrong merge is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from test_merge import KEEP, trained_adapter
from tiny_model import checkpoint, finished_run, plan, section
from tiny_towers import multimodal
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.config.facts.safetensors_headers import weight_files
from halftune.config.sections.model import (
    Ia3Adapter,
    LohaAdapter,
    LokrAdapter,
    LoraAdapter,
    OftAdapter,
    VeraAdapter,
)
from halftune.core.errors import ModelError
from halftune.export.merged import export_run
from halftune.model.files.architectures import no_progress_bars
from halftune.model.result import merge as merging
from halftune.model.result.completed_run import open_run
from halftune.model.result.merge import merge_adapter, round_model
from halftune.model.result.merge_by_layer import merge_by_layer
from halftune.model.result.save import write_model

BOTH_TIED = LoraAdapter(rank=4, modules_to_save=("embed_tokens", "lm_head"))
EXPERTS = LoraAdapter(rank=3, target_parameters=("experts.gate_up_proj", "experts.down_proj"))
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "lora": (LoraAdapter(rank=4), "llama-tiny", {}),
    "rslora": (LoraAdapter(rank=4, use_rslora=True), "qwen2-tiny", {}),
    "dora": (LoraAdapter(rank=4, use_dora=True), "qwen2-tiny", {}),
    "hybrid": (LoraAdapter(rank=4), "qwen3_5-tiny", {}),
    "vera": (VeraAdapter(type="vera"), "llama-tiny", {}),
    "ia3": (Ia3Adapter(type="ia3"), "llama-tiny", {}),
    "oft": (OftAdapter(type="oft", block_size=8), "llama-tiny", {}),
    "loha": (LohaAdapter(type="loha", rank=2), "llama-tiny", {}),
    "lokr beside a head": (LokrAdapter(type="lokr", rank=2, modules_to_save=("lm_head",)), "llama-tiny", {}),
    "tied": (LoraAdapter(rank=4), "qwen2-tiny", {"tie_word_embeddings": True}),
    "embeddings, tied": (BOTH_TIED, "qwen2-tiny", {"tie_word_embeddings": True}),
    "embeddings, not tied": (BOTH_TIED, "qwen2-tiny", {"tie_word_embeddings": False}),
    "adapted embedding": (LoraAdapter(rank=4, target_modules=("embed_tokens", "q_proj")), "llama-tiny", {}),
}


def bits(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118, not a mapping
    return found


def assert_same(base: Path, final: Path, place: Path, stored: Any = "bf16") -> Any:
    made = plan("bf16", "fp32", keep=KEEP)
    whole = merge_adapter(section(base), final, made, stored)
    for name in ("whole", "parts"):
        (place / name).mkdir()
    write_model(whole.model, stored, KEEP, place / "whole")
    merged = merge_by_layer(section(base), final, made, stored, place / "parts", limit=30_000)
    one, other = bits(place / "whole"), bits(place / "parts")
    assert one.keys() == other.keys()
    assert not [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]
    assert (place / "whole" / "config.json").read_bytes() == (place / "parts" / "config.json").read_bytes()
    assert len(list((place / "parts").glob("*.safetensors"))) > 1
    assert merged.update_size == pytest.approx(whole.update_size, rel=1e-6)
    assert merged.update_error == pytest.approx(whole.update_error, rel=1e-6)
    assert 0 < merged.forward_error <= merged.bound
    return merged


@pytest.mark.parametrize("kind", CASES)
def test_the_result_is_that_of_merging_the_whole_model(tmp_path: Path, kind: str) -> None:
    adapter, like, changes = CASES[kind]
    base = checkpoint(tmp_path / "model", torch.bfloat16, like=like, **changes)
    assert_same(base, trained_adapter(base, adapter, tmp_path / "final"), tmp_path)


@pytest.mark.parametrize("stored", ["fp16", "fp32"])
def test_every_format(tmp_path: Path, stored: str) -> None:
    base = checkpoint(tmp_path / "model", torch.bfloat16)
    assert_same(base, trained_adapter(base, LoraAdapter(rank=4), tmp_path / "final"), tmp_path, stored)


@pytest.mark.parametrize("adapter", [EXPERTS, LoraAdapter(rank=4)])
def test_experts(tmp_path: Path, adapter: LoraAdapter) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "vocab_size": 256}
    config = AutoConfig.for_model("qwen3_moe", **sizes)
    torch.manual_seed(0)
    with no_progress_bars():
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    assert_same(tmp_path / "model", trained_adapter(tmp_path / "model", adapter, tmp_path / "final"), tmp_path)


def test_towers(tmp_path: Path) -> None:
    base = multimodal(tmp_path / "model", "qwen2_5_vl")
    assert_same(base, trained_adapter(base, LoraAdapter(rank=4), tmp_path / "final"), tmp_path)


def test_a_full_model_is_rounded(tmp_path: Path) -> None:
    base, made = checkpoint(tmp_path / "model"), plan()
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    write_model(round_model(section(base), made, "bf16").model, "bf16", (), tmp_path / "whole")
    merge_by_layer(section(base), None, made, "bf16", tmp_path / "parts")
    one, other = bits(tmp_path / "whole"), bits(tmp_path / "parts")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_merge_that_goes_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora import Linear

    base = checkpoint(tmp_path / "model")
    final = trained_adapter(base, LoraAdapter(rank=4), tmp_path / "final")
    right = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, name: 1.01 * right(self, name))
    with pytest.raises(ModelError) as refused:
        merge_by_layer(section(base), final, plan(), "bf16", tmp_path)
    assert refused.value.code == "export.merge_inexact"


def test_weights_beyond_the_range_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = checkpoint(tmp_path / "model")
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as refused:
        merge_by_layer(section(base), None, plan(), "fp16", tmp_path)
    assert refused.value.code == "export.beyond_range"


def test_what_is_tied_to_an_adapted_layer_is_merged_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "model", tie_word_embeddings=True)
    theirs = AutoModelForCausalLM.from_pretrained(base)
    final = tmp_path / "final"
    get_peft_model(theirs, LoraConfig(target_modules=["embed_tokens"])).save_pretrained(
        str(final), save_embedding_layers=False
    )
    with pytest.raises(ModelError) as refused:
        merge_by_layer(section(base), final, plan(), "bf16", tmp_path)
    assert refused.value.code == "export.not_enough_memory"


def test_an_export_without_memory_for_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = checkpoint(tmp_path / "base", torch.bfloat16, vocab_size=4096)
    run = open_run(str(finished_run(tmp_path / "run", base)))
    whole = export_run(run, tmp_path / "whole")
    monkeypatch.setattr(merging, "host_memory_bytes", lambda: 1000)
    parts = export_run(run, tmp_path / "parts")
    assert whole.merge is not None
    assert parts.merge is not None
    assert (whole.merge.by_layer, parts.merge.by_layer) == (False, True)
    one, other = bits(tmp_path / "whole"), bits(tmp_path / "parts")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {
        path.name for path in (tmp_path / "parts").iterdir()
    }
