"""Merging: the merged model answers as base plus adapter do, and a wrong merge is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import checkpoint, plan, section

from halftune.config.sections.model import Ia3Adapter, LokrAdapter, LoraAdapter, PeftAdapter
from halftune.core.errors import ModelError
from halftune.model.adapters import attach_adapter
from halftune.model.load.load import load_model
from halftune.model.result.merge import forward_bound, merge_adapter, round_model
from halftune.model.result.save import save_final
from halftune.model.tokenizer.tokenizer import load_tokenizer

KEEP = (r"(^|\.)A_log$",)
KINDS = {
    "lora": LoraAdapter(rank=4),
    "rslora": LoraAdapter(rank=4, use_rslora=True),
    "dora": LoraAdapter(rank=4, use_dora=True),
    "embeddings": LoraAdapter(rank=4, modules_to_save=("embed_tokens",)),
    "embeddings beside ia3": Ia3Adapter(type="ia3", modules_to_save=("embed_tokens",)),
    "head beside lokr": LokrAdapter(type="lokr", rank=2, modules_to_save=("lm_head",)),
}


def trained_adapter(folder: Path, adapter: LoraAdapter | PeftAdapter, target: Path) -> Path:
    made = plan("bf16", "fp32", keep=KEEP)
    model = attach_adapter(load_model(section(folder), made), adapter, made, 0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    save_final(model, load_tokenizer(section("builtin:qwen2-tiny")), made, target)
    return target


@pytest.mark.parametrize("stored", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("kind", "like"),
    [
        ("lora", "qwen2-tiny"),
        ("rslora", "llama-tiny"),
        ("dora", "qwen2-tiny"),
        ("embeddings", "qwen2-tiny"),
        ("embeddings beside ia3", "qwen2-tiny"),  # the names below are those of a model with a tied head
        ("head beside lokr", "qwen2-tiny"),
        ("lora", "qwen3_5-tiny"),
    ],
)
def test_merged_equals_unmerged_to_rounding(tmp_path: Path, kind: str, like: str, stored: str) -> None:
    folder = checkpoint(tmp_path / "model", torch.bfloat16, like=like)
    adapter = trained_adapter(folder, KINDS[kind], tmp_path / "final")
    made = plan("bf16", "fp32", keep=KEEP)
    merge = merge_adapter(section(folder), adapter, made, stored)  # type: ignore[arg-type]
    assert merge.forward_error <= merge.bound
    assert merge.update_size > 0.01
    assert merge.update_error < {"fp32": 1e-6, "bf16": 0.05, "fp16": 0.01}[stored]
    names = [name for name, _ in merge.model.named_parameters()]
    assert not [name for name in names if "lora" in name or "base_layer" in name]
    assert sorted(names) == sorted(name for name, _ in load_model(section(folder), plan()).named_parameters())


def test_a_small_update_loses_more_to_bf16_and_that_is_told(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", torch.bfloat16)
    made = plan("bf16", "fp32")
    model = attach_adapter(load_model(section(folder), made), LoraAdapter(rank=4), made, 0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(1e-5)
    save_final(model, load_tokenizer(section("builtin:qwen2-tiny")), made, tmp_path / "final")
    rounded = merge_adapter(section(folder), tmp_path / "final", made, "bf16")
    exact = merge_adapter(section(folder), tmp_path / "final", made, "fp32")
    assert rounded.update_error > 0.5
    assert exact.update_error < 0.01


@pytest.mark.parametrize("magnifies", [False, True])
def test_a_merge_that_goes_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magnifies: bool) -> None:
    """Also where the bound comes from the model itself, since it magnifies rounding beyond the usual bound."""
    from peft.tuners.lora import Linear

    if magnifies:
        usual = forward_bound("fp32", 2) / 50
        monkeypatch.setattr(
            "halftune.model.result.merge.forward_bound", lambda stored, _: usual if stored == "fp32" else 1.0
        )
    folder = checkpoint(tmp_path / "model")
    adapter = trained_adapter(folder, KINDS["lora"], tmp_path / "final")
    assert merge_adapter(section(folder), adapter, plan(), "fp32").forward_error < 1e-5
    right = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, name: 1.01 * right(self, name))
    with pytest.raises(ModelError) as refused:
        merge_adapter(section(folder), adapter, plan(), "fp32")
    assert refused.value.code == "export.merge_inexact"


def test_weights_that_overflow_fp16_are_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"1 weights exceed the fp16 range \(65,504\), first .*up_proj.weight \(100,000\)"
    ):
        round_model(section(folder), plan(), "fp16")
    assert round_model(section(folder), plan(), "bf16").stored == "bf16"


def test_too_little_memory_is_said_before_loading(tmp_path: Path) -> None:
    from dataclasses import replace

    from halftune.core.choice import Choice

    made = replace(plan(), num_parameters=Choice(10**14, "a very large model"))
    with pytest.raises(ModelError, match=r"merging needs 372,?529\.\d GiB of main memory"):
        merge_adapter(section(tmp_path / "not-read"), tmp_path, made, "bf16")


def test_the_bound_follows_the_format() -> None:
    assert forward_bound("bf16", 3) == 8 * 2**-7
    assert forward_bound("fp16", 3) == 8 * 2**-10
    assert forward_bound("fp32", 3) < 2e-5
