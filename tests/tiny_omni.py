"""A tiny Qwen-Omni checkpoint: its thinker, and tensors of a talker and a vocoder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_audio import audio_model

AROUND = {
    "qwen2_5_omni": {
        "talker.model.layers.7.mlp.up_proj.weight": (3, 5), "token2wav.code2wav_dit_model.proj.bias": (7,),
    },
    "qwen3_omni_moe": {
        "talker.model.layers.7.mlp.experts.0.up_proj.weight": (3, 5), "code2wav.decoder.0.conv.bias": (7,),
    },
}  # fmt: skip
CLASSES = {
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration", "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
}  # fmt: skip


def omni_model(folder: Path, dtype: torch.dtype = torch.float32, kind: str = "qwen2_5_omni") -> Path:
    """Writes the checkpoint; its talker and vocoder are not built, as with ``enable_audio_output: false``."""
    audio_model(folder, f"{kind}_thinker")
    weights = folder / "model.safetensors"
    tensors = {f"thinker.{name.removeprefix('thinker.')}": one.to(dtype) for name, one in load_file(weights).items()}
    tensors |= {name: torch.randn(shape) for name, shape in AROUND[kind].items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    inner = {**config, "dtype": str(dtype).removeprefix("torch.")}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "embedding_size": 32, "head_dim": 8, "vocab_size": 160_000}  # fmt: skip
    outer = {
        "architectures": [CLASSES[kind]], "model_type": kind,
        "enable_audio_output": False, "dtype": inner["dtype"], "thinker_config": inner,
        "talker_config": sizes if kind == "qwen2_5_omni" else {},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(outer))
    if kind == "qwen2_5_omni":
        torch.save({}, folder / "spk_dict.pt")
    return folder
