"""A tiny Qwen2.5-Omni checkpoint: its thinker, and tensors of a talker and a vocoder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_audio import audio_model

AROUND = {"talker.model.layers.7.mlp.up_proj.weight": (3, 5), "token2wav.code2wav_dit_model.proj.bias": (7,)}


def omni_model(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the checkpoint; its talker and vocoder are not built, as with ``enable_audio_output: false``."""
    audio_model(folder, "qwen2_5_omni_thinker")
    weights = folder / "model.safetensors"
    tensors = {f"thinker.{name.removeprefix('thinker.')}": one.to(dtype) for name, one in load_file(weights).items()}
    tensors |= {name: torch.randn(shape) for name, shape in AROUND.items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    inner = {**config, "dtype": str(dtype).removeprefix("torch.")}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "embedding_size": 32, "head_dim": 8, "vocab_size": 160_000}  # fmt: skip
    outer = {
        "architectures": ["Qwen2_5OmniForConditionalGeneration"], "model_type": "qwen2_5_omni",
        "enable_audio_output": False, "dtype": inner["dtype"], "thinker_config": inner, "talker_config": sizes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(outer))
    torch.save({}, folder / "spk_dict.pt")
    return folder
