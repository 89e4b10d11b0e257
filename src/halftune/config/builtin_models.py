"""The builtin models as plain data: the ``config.json`` of each small architecture that is made locally, offline.

Their weights and tokenizer are made by ``halftune.model.builtin``; the plan needs only what stands here.
"""

from __future__ import annotations

from typing import Any

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

BUILTIN_MODELS: dict[str, dict[str, Any]] = {
    # 2.9 M parameters; grouped-query attention with biases on q, k and v; tied head
    "qwen2-tiny": {
        **_SHARED,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    },
    # 23.6 M parameters, otherwise as above
    "qwen2-small": {
        **_SHARED,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 384,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    },
    # 3.7 M parameters; no biases; a head of its own
    "llama-tiny": {
        **_SHARED,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    },
    # 3.1 M parameters; three gated-delta-rule layers to one of gated softmax attention, partial rotary embedding
    "qwen3_5-tiny": {
        **_SHARED,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 192,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": False,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
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
        "tie_word_embeddings": True,
    },
}
