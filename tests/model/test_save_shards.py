"""A model written tensor by tensor: its files are those that transformers would have written, one or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from halftune.model.files.architectures import no_progress_bars
from halftune.model.result.save import write_model, write_shards

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


def model_of(kind: str, folder: Path) -> Any:
    if kind == "tied":
        model: Any = Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True))
    else:
        model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=3))
    with no_progress_bars():
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder)


def tensors_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    done: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        done.setdefault(id(tensor), (name, tensor.detach()))
    return list(done.values())


@pytest.mark.parametrize("kind", ["tied", "experts"])
@pytest.mark.parametrize("limit", [3000, 10**9])
def test_pieces_are_what_transformers_writes(kind: str, limit: int, tmp_path: Path) -> None:
    model = model_of(kind, tmp_path / "whole")
    folder = tmp_path / "pieces"
    folder.mkdir()
    write_shards(model, tensors_of(model), folder, limit)
    whole, found = load_file(tmp_path / "whole" / "model.safetensors"), {}
    for path in folder.glob("*.safetensors"):
        held = load_file(path)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= limit
        found |= held
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (limit < 10**9)
    if index.exists():
        told = json.loads(index.read_text())
        assert told["weight_map"].keys() == whole.keys()
        assert told["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())


def test_a_model_written_so_loads(tmp_path: Path) -> None:
    model = model_of("experts", tmp_path / "whole")
    write_model(model, "bf16", (r"norm",), tmp_path / "pieces", iter(tensors_of(model)))
    with no_progress_bars():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "pieces", dtype=torch.float32)
    for name, weight in model.named_parameters():
        expected = weight if "norm" in name else weight.bfloat16().float()
        assert torch.equal(again.get_parameter(name), expected), name
    assert json.loads((tmp_path / "pieces" / "config.json").read_text())["dtype"] == "bfloat16"
