"""The builtin models' ``config.json``, and the shipped recipes.

``halftune.model.builtin`` creates weights and tokenizer; plans need only these values.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

FOLDER = "configs"


def recipes() -> dict[str, Path]:
    """Return every shipped recipe: its name, such as ``quickstart.yaml``, and its file."""
    package = Path(str(files("halftune")))
    folder = package / FOLDER  # in an installed wheel
    if not folder.is_dir() and package.parent.name == "src":
        folder = package.parent.parent / FOLDER  # in a checkout
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find(path: Path) -> Path:
    """Return the file if it exists, else the shipped recipe named ``NAME`` or ``configs/NAME``, if any."""
    if os.path.exists(path):
        return path
    return recipes().get(path.as_posix().removeprefix(f"{FOLDER}/"), path)


def listed() -> str:
    """Return the names of all shipped recipes, comma-separated."""
    return ", ".join(f"{FOLDER}/{name}" for name in recipes())


# Every builtin model shares one tokenizer: byte-level BPE, 4,096 entries, these three control tokens first.
VOCAB_SIZE = 4096
PAD_TOKEN, START_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "use_cache": True,
}
# Four layers of grouped-query attention, as Qwen2 and Llama have them.
_DECODER: dict[str, Any] = {
    **_SHARED,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
_QWEN2 = {**_DECODER, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_THREE_TO_ONE = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]

# What a model that sees adds to the tokenizer.
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SEEING = {**_DECODER, "vocab_size": VOCAB_SIZE + len(IMAGE_TOKENS), "model_type": "qwen2_5_vl_text"}
_SEEING["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}

BUILTIN_MODELS: dict[str, dict[str, Any]] = {
    # 2.9 M parameters; grouped-query attention with biases on q, k and v; tied head
    "qwen2-tiny": _QWEN2,
    # 23.6 M parameters, otherwise as above
    "qwen2-small": {**_QWEN2, "hidden_size": 384, "intermediate_size": 2048, "num_hidden_layers": 8},
    # 3.6 M parameters: the decoder of qwen2-tiny, and a tower of two layers that sees patches of 7 pixels
    "qwen2_5_vl-tiny": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": _SEEING,
        "vision_config": {
            "depth": 2,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 192,
            "patch_size": 7,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        "vision_start_token_id": VOCAB_SIZE,
        "vision_end_token_id": VOCAB_SIZE + 1,
        "image_token_id": VOCAB_SIZE + 2,
        "video_token_id": VOCAB_SIZE + 3,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "dtype": "float32",
    },
    # 3.7 M parameters; no biases; untied head
    "llama-tiny": {
        **_DECODER,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 32,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    # 3.1 M parameters; three gated-delta-rule layers to one of gated softmax attention, partial rotary embedding
    "qwen3_5-tiny": {
        **_DECODER,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "intermediate_size": 640,
        "num_attention_heads": 4,
        "head_dim": 64,
        "attention_bias": False,
        "layer_types": _THREE_TO_ONE,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    # 3.4 M parameters; three layers of Kimi delta attention to one of latent attention without positions; experts
    "kimi_linear-tiny": {
        **{name: value for name, value in _SHARED.items() if name != "max_position_embeddings"},
        "model_max_length": 4096,
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_size": 192,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "layer_types": _THREE_TO_ONE,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_shared_experts": 1,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
    },
    # 2.3 M parameters; state-space layers only, no attention
    "mamba2-tiny": {
        **{name: value for name, value in _SHARED.items() if name not in ("rms_norm_eps", "attention_dropout")},
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 192,
        "num_hidden_layers": 6,
        "num_heads": 8,
        "head_dim": 48,
        "expand": 2,
        "state_size": 32,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 64,
        "tie_word_embeddings": True,
    },
    # 3.6 M parameters; time mixing with RWKV-7's generalised delta rule in every layer; no softmax attention
    "rwkv7-tiny": {
        **{name: _SHARED[name] for name in ("vocab_size", "pad_token_id", "eos_token_id", "max_position_embeddings")},
        "bos_token_id": None,
        "dtype": "float32",
        "use_cache": True,
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "decay_low_rank_dim": 32,
        "a_low_rank_dim": 32,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 64,
        "tie_word_embeddings": False,
    },
}
