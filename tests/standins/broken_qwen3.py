"""Copies of Qwen3 as remote code, each with one defect, as ``halftune certify`` meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

HEAD = """
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

class BrokenConfig(Qwen3Config):
    model_type = "broken_qwen3"

class BrokenForCausalLM(Qwen3ForCausalLM):
    config_class = BrokenConfig
"""
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
SOUND = ""
POSITIONS_STAY = """
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **rest):
        if past_key_values is not None and past_key_values.get_seq_length() and input_ids.shape[1] == 1:
            first = self.prompt if position_ids is None else position_ids * 0 + self.prompt
            position_ids = first
        elif position_ids is not None:
            self.prompt = int(position_ids.max()) + 1
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                               past_key_values=past_key_values, **rest)
"""
SECOND_TOKEN_IS_WRONG = """
    def forward(self, input_ids=None, past_key_values=None, **rest):
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        self.steps = self.steps + 1 if before and input_ids.shape[1] == 1 else 0
        out = super().forward(input_ids=input_ids, past_key_values=past_key_values, **rest)
        if self.steps >= 2:
            out.logits = out.logits.roll(1, 1) if out.logits.shape[1] > 1 else out.logits * 1.1
        return out
"""
MASK_IS_DROPPED = """
    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **rest):
        if past_key_values is not None and past_key_values.get_seq_length():
            attention_mask = None
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, past_key_values=past_key_values,
                               **rest)
"""
DETACHED = """
    def __init__(self, config):
        super().__init__(config)
        projection = self.model.layers[{layer}].self_attn.{name}_proj
        projection.register_forward_hook(lambda module, given, out: out.detach())
"""
UNTIED = """
    _tied_weights_keys = {}
"""
LATE = """
    def __init__(self, config):
        super().__init__(config)
        layer = self.model.layers[{layer}].self_attn
        layer.register_forward_pre_hook(lambda module, args, kwargs: (args, {{**kwargs, "attention_mask": None}}),
                                        with_kwargs=True)
"""
RECOMPUTED = """
    def forward(self, input_ids=None, **rest):
        out = super().forward(input_ids=input_ids, **rest)
        if self.model.gradient_checkpointing and self.training:
            out.logits = out.logits * {factor}
        return out
"""
RECOMPUTED_GRADIENT = """
    def __init__(self, config):
        super().__init__(config)
        def change(module, given, out):
            if self.model.gradient_checkpointing and self.training:
                return out + (out - out.detach()) * 0.1
        self.model.layers[1].mlp.register_forward_hook(change)
"""
DROPOUT = """
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.register_forward_hook(lambda module, given, out: nn.functional.dropout(out, 0.1, True))
"""
ROTARY_IN_FP32 = """
    def __init__(self, config):
        super().__init__(config)
        rotary = self.model.rotary_emb
        rotary.register_forward_hook(lambda module, given, out: tuple(one.float() for one in out))
"""
WINDOW_IN_MASK_ONLY = """
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.sliding_window = None
"""


def write(folder: Path, defect: str, **values: Any) -> Path:
    """Write the files of a copy with a defect."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "modeling_broken.py").write_text(HEAD + (defect or "    pass\n"))
    classes = {
        "AutoConfig": "modeling_broken.BrokenConfig",
        "AutoModelForCausalLM": "modeling_broken.BrokenForCausalLM",
    }
    raw = {**CONFIG_MAPPING["qwen3"](**{**SIZES, **values}).to_dict(), "model_type": "broken_qwen3"}
    raw |= {"auto_map": classes, "architectures": ["BrokenForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
